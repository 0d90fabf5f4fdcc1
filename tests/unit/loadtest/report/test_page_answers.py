"""What a page answers at a glance: limits in its charts, what was tested, the best load; and that nothing is cut."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from loadtest.drive.record import Record
from loadtest.report.pages import page, series_page
from loadtest.report.prompt_charts import latency_histogram, ttft_by_prompt
from loadtest.report.schema import Bounds, GpuSeries, PageSeries, Samples
from loadtest.report.series import Ran, series_of
from loadtest.report.single_requests import shown_requests
from loadtest.report.tested import what_was_tested
from tests.browser import browser_page, needs_browser
from tests.unit.loadtest.report.pages import plots_of
from tests.unit.loadtest.report.runs import ENVIRONMENT, curve_of, records_of, run_of

BOUNDS = Bounds(ttft_ms=150, e2e_ms=900)
BUSY = Samples(
    gpus=[GpuSeries(name="0 H100", driver="1", memory_total_mib=81559.0, at=[0.0, 1.0],
                    utilization_percent=[40.0, 60.0], memory_used_mib=[1.0, 1.0], power_watts=[300.0, 300.0])],
    no_gpu=None,
    pages=[],
)  # fmt: skip


def of_lengths() -> list[Record]:
    """One token a millisecond of prefill."""
    random, made = Random(3), []
    for index in range(200):
        length, start = random.randrange(10, 4000), float(index)
        made.append(
            Record(
                index,
                0,
                start,
                sent=start,
                end=start + length / 1000 + 0.1,
                outcome="ok",
                first_token=start + length / 1000,
                completion_tokens=5,
                prompt_tokens=length,
                events=5,
                reads=5,
                backend="a",
            )
        )
    return made


def test_the_limits_of_the_slo_and_the_target_of_gpus_are_lines() -> None:
    records = records_of(0.1)
    results = run_of(records, BOUNDS).model_copy(update={"samples": BUSY})
    plots = {plot["title"]: plot for plot in plots_of(page(results, records))}
    assert plots["TTFT over time"]["bounds"] == [[150, "SLO: 150 ms"]]
    assert plots["E2E over time"]["bounds"] == [[900, "SLO: 900 ms"]]
    assert plots["TPOT over time"]["bounds"] == []
    assert plots["GPU utilisation"]["bounds"] == [[85, "target: 85 %"]]
    low, high = plots["TTFT over time"]["y"]["range"]
    assert low <= 150 <= high


def test_every_axis_has_a_title() -> None:
    pages = PageSeries(
        name="engine", url="http://x", at=[0.0, 1.0], running=[1.0, 2.0], waiting=[0.0, 0.0],
        kv_cache_usage=[0.1, 0.2], preemptions=[0.0, 0.0], prefix_queries=[0.0, 10.0], prefix_hits=[0.0, 5.0],
    )  # fmt: skip
    samples = BUSY.model_copy(update={"pages": [pages]})
    records = of_lengths()
    html = page(run_of(records, BOUNDS).model_copy(update={"samples": samples}), records)
    plots = plots_of(html) + plots_of(series_page(curve_of({"a": 1.0, "b": 2.0}), []))
    assert {"GPU utilisation", "KV cache in use", "Prefix cache hits"} <= {plot["title"] for plot in plots}
    assert [plot["title"] for plot in plots if not (plot["x"]["title"] and plot["y"]["title"])] == []


def test_what_was_tested_comes_before_the_charts() -> None:
    records = records_of(0.1)
    html = page(run_of(records).model_copy(update={"samples": BUSY}), records)
    tested = html.index("What was tested")
    assert html.index("0 H100") > tested
    assert tested < html.index("Over the run")
    assert "50 prompt tokens a request, 5 output tokens" in html


def test_what_was_tested_has_engines_flags_gpus_and_checks_of_the_checkpoint() -> None:
    card = {"id": "m", "max_model_len": 4096}
    cache = {"num_gpu_blocks": "1000", "cache_dtype": "fp8", "block_size": "None"}
    process = {"command": ["vllm", "serve", "m", "--max-num-seqs", "64"]}
    checkpoint = {
        "servers": [
            {"role": "engine", "name": "a", "version": "0.33", "models": [card], "cache_config": [cache],
             "process": process},
            {"role": "gateway", "name": "", "unreachable": "no answer", "process": None},
        ],
        "hardware": {"gpus": [{"name": "H100"}, {"name": "H100"}], "driver": "570"},
        "checks": [{"name": "health", "status": "ok"}, {"name": "answers", "status": "failed"}],
    }  # fmt: skip
    records = records_of(0.1)
    rows = dict(what_was_tested(run_of(records), checkpoint))
    assert rows["engine a"] == "version 0.33, m of 4,096 tokens, num_gpu_blocks 1000, cache_dtype fp8"
    assert rows["engine a: command"] == "vllm serve m --max-num-seqs 64"
    assert rows["gateway"] == "no answer"
    assert rows["GPUs"] == "2 x H100, driver 570"
    assert rows["checks"] == "1 ok, 1 failed: answers failed"
    assert "vllm serve m --max-num-seqs 64" in page(run_of(records), records, checkpoint)
    of_one = run_of(records)
    html = series_page(curve_of({"a": 1.0, "b": 1.0}), [], (of_one, checkpoint))
    assert html.index("What was tested") < html.index("2 x H100") < html.index("By load")
    assert '<td class="text">a, b</td>' in html


def test_the_first_token_is_drawn_by_the_length_of_the_prompt() -> None:
    records = of_lengths()
    chart = ttft_by_prompt(run_of(records, BOUNDS), records, shown_requests(records))
    assert chart
    [median] = chart.series
    for length, milliseconds in median.points:
        assert milliseconds == pytest.approx(length, rel=0.2)
    assert len(chart.dots) == 200
    assert chart.bounds == [(150, "SLO: 150 ms")]
    equal = records_of(0.1, count=40)
    assert ttft_by_prompt(run_of(equal), equal, shown_requests(equal)) is None


def test_a_histogram_counts_every_request_once() -> None:
    records = of_lengths()
    chart = latency_histogram(records)
    assert chart
    assert [sum(count or 0 for _, count in line.points) for line in chart.series] == [200, 200]
    assert latency_histogram(records[:10]) is None


def test_throughput_against_latency_marks_the_load_with_the_most_goodput() -> None:
    ran = [
        Ran("", f"c{users}", 0, results=run_of(records_of(ttft, seconds=0.4 / users), BOUNDS, concurrency=users))
        for users, ttft in ((1, 0.05), (2, 0.1), (4, 0.2))
    ]
    plots = plots_of(series_page(series_of(ran, ENVIRONMENT), []))
    chart, by_user = [plot for plot in plots if "against" in plot["title"]]
    assert by_user["x"]["title"] == "output tokens/s and user"
    assert [text for _, _, text in by_user["labels"]] == ["c1", "c2", "c4"]
    assert chart["title"] == "Throughput against latency"
    assert (chart["x"]["title"], chart["y"]["title"]) == ("E2E p95", "output tokens/s")
    assert len(chart["data"][1]) == 3
    assert [text for _, _, text in chart["labels"]] == ["c1", "c2", "c4"]
    [[_, rate]] = chart["ringed"]
    assert rate == pytest.approx(chart["data"][1][1])
    assert chart["uprights"] == [[900, "SLO: 900 ms"]]
    [[style, route]] = chart["routes"]
    assert (style, route) == ("s1", [place[:2] for place in chart["labels"]])


def test_a_best_load_that_others_may_equal_is_a_tie_and_one_that_the_client_spoilt_is_none() -> None:
    def note(lag: float = 0.001, slower: float = 1.0) -> str:
        ran = [
            Ran("", f"c{users}", n, results=run_of(records, BOUNDS, lag=lag, concurrency=users))
            for n in range(4)
            for users in (1, 2)
            if (records := records_of(0.05, seconds=(0.4 + n / 100) * (slower if users == 1 else 1)))
        ]
        html = series_page(series_of(ran, ENVIRONMENT), [])
        return html[html.index("a point for each load") :].split("<")[0]

    assert "the best one: c2, 2.61 requests/s within the SLO; it ties with c1" in note()
    assert "ties" not in note(slower=2)
    assert note(lag=0.9) == "a point for each load; no valid run keeps the SLO"


def test_latency_by_load_has_the_limit_of_the_slo() -> None:
    series = curve_of({"": 1.0}).model_copy(update={"limits": {"ttft_ms": 150.0}})
    plots = {plot["title"]: plot for plot in plots_of(series_page(series, []))}
    assert plots["TTFT p95 by users"]["bounds"] == [[150, "SLO: 150 ms"]]
    assert plots["E2E p95 by users"]["bounds"] == []


def test_a_series_page_begins_with_the_answer_of_a_search_and_the_batch_size_curve() -> None:
    series = curve_of({"": 1.0}).model_copy(update={"answer": ["2 users within the SLO", "At 2 users: 5 tokens/s"]})
    html = series_page(series, [])
    places = [html.index(text) for text in ("2 users within the SLO", "At 2 users", "Batch-size curve", "By load")]
    assert places == sorted(places)
    assert "the server generates" in html
    assert "Batch-size curve" not in series_page(curve_of({"a": 1.0, "b": 1.0}), [])


def test_gpus_are_columns_and_charts_of_a_series() -> None:
    ran = [
        Ran("", f"c{users}", 0, results=run_of(records_of(0.1), concurrency=users).model_copy(update={"samples": BUSY}))
        for users in (1, 2)
    ]
    series = series_of(ran, ENVIRONMENT)
    html = series_page(series, [])
    assert all(f"<th>{title}</th>" in html for title in ("GPU %", "GPU W", "tokens/J"))
    plots = {plot["title"]: plot for plot in plots_of(html)}
    assert plots["GPU utilisation by users"]["bounds"] == [[85, "target: 85 %"]]
    assert plots["Tokens per joule by users"]["data"][1][0] == pytest.approx(12.5 / 300, rel=0.05)


@needs_browser
@pytest.mark.timeout(180)
async def test_nothing_of_a_page_is_cut(tmp_path: Path) -> None:
    records = of_lengths()
    ran = [
        Ran(
            target,
            f"c{users}",
            n,
            results=run_of(records_of(0.1, seconds=0.4 / users + n / 100), BOUNDS, concurrency=users),
        )
        for n in range(3)
        for users in (1, 8, 32)
        for target in ("direct", "gateway")
    ]
    pages = {
        "run": page(run_of(records, BOUNDS).model_copy(update={"samples": BUSY}), records),
        "series": series_page(series_of(ran, ENVIRONMENT), []),
    }
    cut = "[...document.querySelectorAll('.card')].filter((each) => each.scrollWidth > each.clientWidth + 1).length"
    for name, html in pages.items():
        file = tmp_path / f"{name}.html"
        file.write_text(html, encoding="utf-8")
        async with browser_page(tmp_path / name) as tab:
            await tab.resize(1360, 900)
            await tab.open(file.as_uri())
            await tab.until(f"document.documentElement.dataset.drawn == {html.count('data-plot=')}")
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
            assert await tab.run(cut) == 0, name
            await tab.prefer("dark")
            await tab.resize(400, 800, is_phone=True)
            await tab.until("[...document.querySelectorAll('.u-wrap')].every((each) => each.offsetWidth < 380)")
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth"), name
            assert await tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 27)"
            assert tab.complaints == []
