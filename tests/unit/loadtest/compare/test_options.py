"""What is asked for becomes engines to start, or servers that run already."""

from pathlib import Path

import pytest

from loadtest.compare.options import OF_RUN, CompareOptions, Overheads
from loadtest.drive.options import RunOptions
from loadtest.servers.engines import Kind


def test_real_engines_take_their_model_from_a_folder() -> None:
    options = CompareOptions(engine=Kind.VLLM, engines=3, model="models/small", kv_tokens=4096, max_model_len=512)
    wanted = options.engine_options
    assert (wanted.kind, wanted.count, wanted.model_dir, wanted.model) == (Kind.VLLM, 3, Path("models/small"), "small")
    assert (wanted.kv_tokens, wanted.max_model_len_tokens) == (4096, 512)


def test_servers_that_run_are_named_by_their_base_urls() -> None:
    options = CompareOptions(backends="http://10.0.0.1:8000/v1, 10.0.0.2:8000")
    assert options.backend_urls == ("http://10.0.0.1:8000", "http://10.0.0.2:8000")


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        (CompareOptions(), True),
        (CompareOptions(engine=Kind.VLLM), False),
        (CompareOptions(backends="http://a:1"), False),
        (CompareOptions(engine=Kind.VLLM, overhead=Overheads.YES), True),
        (CompareOptions(overhead=Overheads.NO), False),
    ],
)
def test_overhead_is_measured_apart_where_engines_leave_time_for_it(options: CompareOptions, apart: bool) -> None:
    assert options.measures_overhead is apart


def test_every_option_of_a_run_that_is_taken_over_is_one() -> None:
    assert set(OF_RUN) <= set(RunOptions.model_fields)
    assert not set(OF_RUN) & set(CompareOptions.model_fields)
