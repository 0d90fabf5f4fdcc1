from pathlib import Path

import pytest

from gateway.core.backends.facts import AdapterReport
from gateway.core.backends.vllm_metrics import MAX_LINES, Findings, LineFilter, MetricsReader
from gateway.core.turns import at_once

RUNNING = b'vllm:num_requests_running{engine="0"} 0\n'  # every server of vLLM has it
RECORDINGS = Path(__file__).parents[2] / "contract/recordings"


def scrape(page: bytes, piece_bytes: int = 1000) -> Findings:
    lines = LineFilter()
    for start in range(0, len(page), piece_bytes):
        lines.feed(page[start : start + piece_bytes])
    return at_once(MetricsReader().read(lines.finish(), 5.0))


def rank(number: int, running: float, queries: float, tokens: str = "100") -> str:
    labels = f'engine="{number}",model_name="m"'
    return (
        f"vllm:num_requests_running{{{labels}}} {running}\n"
        f"vllm:prefix_cache_queries_total{{{labels}}} {queries}\n"
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.{number}\n"
        f'vllm:cache_config_info{{block_size="16",engine="{number}",kv_cache_size_tokens="{tokens}"}} 1.0\n'
    )


@pytest.mark.parametrize("piece_bytes", [7, 1000, 10**6])
def test_a_page_of_vllm_is_read_whatever_pieces_it_comes_in(piece_bytes: int) -> None:
    found = scrape((RECORDINGS / "metrics_two_running.txt").read_bytes(), piece_bytes)
    assert found.telemetry is not None
    assert found.telemetry.running == 2
    assert found.telemetry.waiting == 0
    assert found.telemetry.generation_tokens is not None
    assert found.telemetry.generation_tokens > 0
    assert 0 < found.telemetry.kv_usage < 1
    assert found.telemetry.prefix_queries_tokens > 0
    assert found.telemetry.at_seconds == 5.0
    assert [found.facts[name] for name in ("block_size_tokens", "kv_cache_tokens", "prefix_caching")] == [
        32,
        524288,
        True,
    ]
    assert found.facts["process_start_seconds"] > 1.7e9
    assert found.facts["engines"] == 1


def test_waiting_requests_are_counted_once() -> None:
    found = scrape((RECORDINGS / "metrics_one_waiting.txt").read_bytes())
    assert found.telemetry is not None
    assert found.telemetry.waiting == 1


def test_waiting_for_capacity_is_distinguished_from_deferral() -> None:
    page = "".join(
        rank(number, 3, 10) + f'vllm:num_requests_waiting{{engine="{number}",model_name="m"}} {42 + number}\n'
        f'vllm:num_requests_waiting_by_reason{{engine="{number}",model_name="m",reason="capacity"}} {2 + number}\n'
        f'vllm:num_requests_waiting_by_reason{{engine="{number}",model_name="m",reason="deferred"}} 40\n'
        for number in range(2)
    )
    found = scrape(page.encode())
    assert found.telemetry is not None
    assert found.telemetry.waiting == 5


def test_where_reasons_of_waiting_are_not_exposed_all_that_wait_count() -> None:
    found = scrape(rank(0, 3, 10).encode() + b'vllm:num_requests_waiting{engine="0",model_name="m"} 7\n')
    assert found.telemetry is not None
    assert found.telemetry.waiting == 7
    assert found.telemetry.generation_tokens is None


def test_data_parallel_ranks_are_summed() -> None:
    found = scrape((rank(0, 3, 10) + rank(1, 4, 20)).encode())
    assert found.telemetry is not None
    assert (found.telemetry.running, found.telemetry.prefix_queries_tokens, found.telemetry.kv_usage) == (7, 30, 0.1)
    assert (found.facts["engines"], found.facts["kv_cache_tokens"]) == (2, 200)


def test_kv_tokens_fall_back_to_blocks_times_block_size() -> None:
    page = b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="10"} 1.0\n'
    assert scrape(RUNNING + page).facts["kv_cache_tokens"] == 160


def test_an_encoders_only_block_is_no_kv_cache() -> None:
    page = b'vllm:cache_config_info{block_size="128",kv_cache_size_tokens="None",num_gpu_blocks="1"} 1.0\n'
    assert scrape(RUNNING + page).facts["kv_cache_tokens"] is None


def test_unset_settings_are_unknown() -> None:
    page = b'vllm:cache_config_info{block_size="None",num_gpu_blocks="None",enable_prefix_caching="False"} 1.0\n'
    found = scrape(RUNNING + page)
    assert [found.facts[name] for name in ("block_size_tokens", "kv_cache_tokens", "prefix_caching")] == [
        None,
        None,
        False,
    ]


def test_a_page_of_another_server_has_no_telemetry() -> None:
    assert scrape(b"go_goroutines 7\nprocess_start_time_seconds 5\n") == Findings({})


@pytest.mark.parametrize(
    "page",
    [
        b'vllm:num_requests_running{engine="0" 3',
        b"vllm:num_requests_running{\xff\x00} x",
        b"process_start_time_seconds  ",
    ],
)
def test_garbage_is_refused(page: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        scrape(page)


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        scrape(b'vllm:num_requests_running{engine="0"} NaN\n')


def test_neither_an_endless_line_nor_endless_lines_are_kept() -> None:
    lines = LineFilter()
    for _ in range(100):
        lines.feed(b"vllm:num_requests_running{" + b"x" * 10000)
    lines.feed(b'\nvllm:num_requests_running{engine="0"} 1.0\n' * 5000)
    kept = lines.finish()
    assert len(kept) == MAX_LINES
    assert not any(b"xx" in line for line in kept)


def adapters(running: str, waiting: str, at: str, most: str = "2") -> bytes:
    labels = f'max_lora="{most}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {at}\n".encode()


@pytest.mark.parametrize("piece_bytes", [7, 1000, 10**6])
def test_of_all_sets_of_adapters_the_newest_is_read(piece_bytes: int) -> None:
    page = RUNNING + adapters("a", "", "1.7e+09") + adapters("a,b", "c, d", "1.764e+09") + adapters("", "", "1.6e+09")
    telemetry = scrape(page, piece_bytes).telemetry
    assert telemetry is not None
    assert telemetry.adapters == AdapterReport(frozenset("abcd"), 2)


def test_sets_of_adapters_leave_room_for_the_other_lines() -> None:
    page = b"".join(adapters("a", "", f"{number}.0") for number in range(2 * MAX_LINES)) + RUNNING
    telemetry = scrape(page).telemetry
    assert telemetry is not None
    assert telemetry.adapters == AdapterReport(frozenset("a"), 2)


@pytest.mark.parametrize("lines", [b"", adapters("", "", "1.0", most="0"), adapters("", "", "1.0", most="None")])
def test_an_engine_without_lora_reports_no_adapters(lines: bytes) -> None:
    telemetry = scrape(RUNNING + lines).telemetry
    assert telemetry is not None
    assert telemetry.adapters is None


def test_a_reader_that_knows_the_series_reads_new_values_and_refuses_garbage_in_their_place() -> None:
    reader = MetricsReader()

    def read(running: bytes, tokens: bytes = b"16") -> Findings:
        page = [b'vllm:num_requests_running{model_name="a } b"} ' + running, b"process_start_time_seconds 1.5"]
        return at_once(reader.read([*page, b'vllm:cache_config_info{block_size="' + tokens + b'"} 1.0'], 5.0))

    def seen(found: Findings) -> tuple[int, int]:
        assert found.telemetry is not None
        return found.telemetry.running, found.facts["block_size_tokens"]

    assert [seen(read(b"1.0")), seen(read(b"2.0"))] == [(1, 16), (2, 16)]
    assert seen(read(b"3 1764000000000", b"32")) == (3, 32)
    for garbage in (b"", b" ", b"x", b"1.0}"):
        with pytest.raises(ValueError, match=r".*"):
            read(garbage)
    assert seen(read(b"4.0")) == (4, 16)


def test_series_that_never_come_again_do_not_pile_up() -> None:
    reader = MetricsReader()
    for number in range(10_000):
        found = at_once(reader.read([b'vllm:num_requests_running{engine="%d"} 1' % number], 5.0))
        assert found.telemetry is not None
    assert len(reader._known) <= 4096
