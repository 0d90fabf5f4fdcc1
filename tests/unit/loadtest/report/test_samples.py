"""What was watched beside the load, reported."""

from __future__ import annotations

from loadtest.report.chart import linear
from loadtest.report.samples import on_one_grid, sample_charts, samples_rows
from loadtest.report.schema import GpuSeries, PageSeries, Samples

_GPU = GpuSeries(
    name="0 Big",
    driver="1",
    memory_total_mib=2048,
    at=[0.0, 0.5],
    utilization_percent=[50, None],
    memory_used_mib=[512, 1024],
    power_watts=[100, 300],
)
_PAGE = PageSeries(
    name="a",
    url="http://a",
    at=[0.0, 1.0],
    running=[1, 3],
    waiting=[0, 2],
    kv_cache_usage=[0.1, 0.4],
    preemptions=[5, 7],
    prefix_queries=[100, 300],
    prefix_hits=[0, 50],
)


def test_gpus_and_pages_are_reported_in_words() -> None:
    assert samples_rows(Samples(gpus=[_GPU], no_gpu=None, pages=[_PAGE])) == [
        ("GPU 0 Big", "busy 50% on average, 50% at most, 1.0 of 2.0 GiB, 200 W"),
        (
            "metrics of a",
            "running 2 on average, 3 at most; waiting 1 on average, 2 at most; KV cache 40.0% at most; "
            "25.0% prefix hits; 2 preemptions",
        ),
    ]


def test_that_there_was_nothing_to_see_is_reported() -> None:
    silent = PageSeries(name="a", url="http://a", failures=3)
    assert samples_rows(Samples(gpus=[], no_gpu="no GPU: none here", pages=[silent])) == [
        ("GPU", "no GPU: none here"),
        ("metrics of a", "never read (3 failures)"),
    ]


def test_there_is_a_picture_of_everything_that_was_seen() -> None:
    time = linear(0, 2, 0, 100)
    everything = Samples(gpus=[_GPU], no_gpu=None, pages=[_PAGE])
    charts = list(sample_charts(everything, time))
    assert [chart.title for chart in charts] == [
        "GPU utilisation",
        "Requests in the engines",
        "KV cache in use",
        "Prefix cache hits",
    ]
    hits = charts[-1].series[0].points
    assert [value for _, value in hits] == [25, 25]
    bare = PageSeries(name="a", url="u", at=[0.0], running=[None], waiting=[None], kv_cache_usage=[None])
    assert list(sample_charts(Samples(gpus=[], no_gpu="no", pages=[bare]), time)) == []


def test_long_runs_are_thinned_and_keep_their_extremes() -> None:
    moments = [float(second) for second in range(36_000)]
    values: list[float | None] = [5.0] * len(moments)
    values[1234], values[30_001] = 99.0, 0.0
    (points,) = on_one_grid([("a", moments, values)], 36_000.0)
    assert len(points) <= 502
    drawn = [value for _, value in points]
    assert (max(filter(None, drawn)), drawn.count(0.0), drawn.count(99.0)) == (99, 1, 1)
    assert [at for at, _ in points] == sorted(at for at, _ in points)


def test_a_late_reading_leaves_no_gap_but_a_silence_does() -> None:
    lines = [("a", [0.0, 1.99, 3.0], [1.0, 2.0, 3.0]), ("b", [0.1, 4.1], [7.0, 8.0])]
    a, b = on_one_grid(lines, 5.0)
    assert [at for at, _ in a] == [at for at, _ in b]
    assert [value for at, value in a if at == int(at)] == [1, 2, 2, 3, 3]
    assert [value for at, value in b if at == int(at)] == [7, 7, None, None, 8]
