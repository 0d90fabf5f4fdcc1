"""What was watched beside the load, told."""

from __future__ import annotations

from loadtest.report.axes import linear
from loadtest.report.samples import sample_charts, samples_told
from loadtest.report.schema import GpuSeries, PageSeries, Samples

_GPU = GpuSeries(
    name="0 Big", driver="1", memory_total_mib=2048, at=[0.0, 0.5], utilization_percent=[50, None],
    memory_used_mib=[512, 1024], power_watts=[100, 300],
)  # fmt: skip
_PAGE = PageSeries(
    name="a", url="http://a", at=[0.0, 1.0], running=[1, 3], waiting=[0, 2], kv_cache_usage=[0.1, 0.4],
    preemptions=[5, 7], prefix_queries=[100, 300], prefix_hits=[0, 50],
)  # fmt: skip


def test_gpus_and_pages_are_told_in_words() -> None:
    assert samples_told(Samples(gpus=[_GPU], no_gpu=None, pages=[_PAGE])) == [
        ("GPU 0 Big", "busy 50% on average, 50% at most, 1.0 of 2.0 GiB, 200 W"),
        (
            "metrics of a",
            "running 2 on average, 3 at most; waiting 1 on average, 2 at most; KV cache 40.0% at most; "
            "25.0% prefix hits; 2 preemptions",
        ),
    ]


def test_that_there_was_nothing_to_see_is_told() -> None:
    silent = PageSeries(name="a", url="http://a", failures=3)
    assert samples_told(Samples(gpus=[], no_gpu="no GPU: none here", pages=[silent])) == [
        ("GPU", "no GPU: none here"),
        ("metrics of a", "never read (3 failures)"),
    ]


def test_there_is_a_picture_of_everything_that_was_seen() -> None:
    time = linear(0, 2, 0, 100)
    everything = Samples(gpus=[_GPU], no_gpu=None, pages=[_PAGE])
    titles = [chart.title for chart in sample_charts(everything, time)]
    assert titles == ["GPU utilisation", "Requests in the engines", "KV cache in use"]
    assert all("<svg" in chart.svg() for chart in sample_charts(everything, time))
    bare = PageSeries(name="a", url="u", at=[0.0], running=[None], waiting=[None], kv_cache_usage=[None])
    assert list(sample_charts(Samples(gpus=[], no_gpu="no", pages=[bare]), time)) == []
