"""Input files: what is valid, what is refused and on which line, and what hostile files cost."""

import resource
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.config import ServerConfig
from gateway.features.batches.input import CheckedInput, InputLimits, InvalidInput, check_input, read_lines
from gateway.features.batches.settings import BatchesConfig

URL = "/v1/chat/completions"
LIMITS = InputLimits.of(BatchesConfig(), ServerConfig())


def line(name: Any = "a", **changes: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}
    return orjson.dumps({"custom_id": name, "method": "POST", "url": URL, "body": body, **changes})


def check_file(path: Path, limits: InputLimits = LIMITS, url: str = URL) -> CheckedInput:
    with path.open("rb") as source:
        return check_input(source, url, limits, lambda: None)


def check(folder: Path, content: bytes, limits: InputLimits = LIMITS) -> CheckedInput:
    path = folder / "input"
    path.write_bytes(content)
    return check_file(path, limits)


def errors_of(folder: Path, content: bytes, limits: InputLimits = LIMITS) -> list[tuple[str, int | None]]:
    with pytest.raises(InvalidInput) as invalid:
        check(folder, content, limits)
    return [(error["code"], error["line"]) for error in invalid.value.errors]


def test_a_valid_file_is_indexed_and_read_again_in_any_order(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + line("a") + b"\r\n\n  " + line("b\u00e4") + b" \n" + line("c")
    checked = check(tmp_path, content)
    assert (len(checked.index), checked.model) == (3, "m")
    index = checked.index
    with (tmp_path / "input").open("rb") as source:
        assert [each.custom_id for each in read_lines(source, [index[2], index[0]])] == ["c", "a"]
        assert [each.custom_id for each in read_lines(source, [index[0], index[1]])] == ["a", "b\u00e4"]
        [first] = read_lines(source, [index[0]])
    assert orjson.loads(first.body) == first.document
    assert first.document["model"] == "m"


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b"\0\0\0", "invalid_json_line"),
        (line().replace(b"Hello", b"\xff"), "invalid_json_line"),
        (line(body={"model": "m", "x": 0}).replace(b"0", b"[" * 500 + b"]" * 500), "invalid_json_line"),
        (line(None), "invalid_custom_id"),
        (line(""), "invalid_custom_id"),
        (line("x" * 513), "invalid_custom_id"),
        (line("0"), "duplicate_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/embeddings"), "mismatched_endpoint"),
        (line(url="/etc/passwd"), "invalid_url"),
        (line(url=None), "invalid_url"),
        (line(body=[]), "invalid_body"),
        (line(body={}), "missing_model"),
        (line(body={"model": "other"}), "mismatched_model"),
        (line(body={"model": "m", "stream": True}), "stream_not_supported"),
        (line(body={"model": "m", "background": True}), "background_not_supported"),
    ],
)
def test_a_line_that_is_refused(tmp_path: Path, wrong: bytes, code: str) -> None:
    assert errors_of(tmp_path, line("0") + b"\n\n" + wrong + b"\n" + line("1")) == [(code, 3)]


def test_all_errors_are_reported_up_to_a_bound(tmp_path: Path) -> None:
    assert errors_of(tmp_path, b"{\n" * 3) == [("invalid_json_line", number) for number in (1, 2, 3)]
    assert len(errors_of(tmp_path, b"{\n" * 500)) == 100


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"   "])
def test_a_file_without_requests(tmp_path: Path, content: bytes) -> None:
    assert errors_of(tmp_path, content) == [("empty_file", None)]


def test_a_file_with_one_request_too_many(tmp_path: Path) -> None:
    lines = [line(str(number)) for number in range(50001)]
    assert len(check(tmp_path, b"\n".join(lines[:50000])).index) == 50000
    assert errors_of(tmp_path, b"\n".join(lines)) == [("too_many_requests_in_file", 50001)]
    few = InputLimits.of(BatchesConfig(max_lines=10), ServerConfig())
    assert errors_of(tmp_path, b"\n" * 1000, few) == [("too_many_requests_in_file", 22)]


@pytest.mark.parametrize("unit", [b"x", b"\0", b'{"a":[{},{"b":""}]},', b'"\\\\"'], ids=repr)
def test_two_hundred_megabytes_in_one_line_cost_little(tmp_path: Path, unit: bytes) -> None:
    path = tmp_path / "input"
    with open(path, "wb") as file:
        file.write(b'{"custom_id":"a","body":[')
        for _ in range(200):
            file.write(unit * (1048576 // len(unit)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.thread_time()
    with pytest.raises(InvalidInput) as invalid:
        check_file(path)
    assert [error["code"] for error in invalid.value.errors] == ["line_too_long"]
    assert time.thread_time() - started < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 65536  # KiB


def test_all_embeddings_requests_of_a_file_share_a_limit_of_inputs(tmp_path: Path) -> None:
    few = InputLimits.of(BatchesConfig(max_embedding_inputs=5), ServerConfig())
    path, url = tmp_path / "input", "/v1/embeddings"
    inputs: list[Any] = [["a", "b"], "c", [1, 2, 3], ["d"]]
    made = [line(str(number), url=url, body={"model": "m", "input": each}) for number, each in enumerate(inputs)]
    path.write_bytes(b"\n".join(made))
    assert len(check_file(path, few, url).index) == 4
    path.write_bytes(b"\n".join([*made, made[1].replace(b'"1"', b'"more"')]))
    with pytest.raises(InvalidInput) as invalid:
        check_file(path, few, url)
    assert [(error["code"], error["line"]) for error in invalid.value.errors] == [("too_many_embedding_inputs", 5)]


def test_lines_that_share_a_prompt_follow_each_other(tmp_path: Path) -> None:
    systems = ["You are terse. " * 40, "You are kind. " * 40]
    made = []
    for number in range(40):
        messages = [{"role": "system", "content": systems[number % 2]}, {"role": "user", "content": f"{number}?"}]
        made.append(line(str(number), body={"model": "m", "messages": messages, "max_tokens": 9}))
    checked = check(tmp_path, b"\n".join(made))
    for _ in checked.order.arrange(1):
        pass
    taken = [place % 2 for place in checked.order.in_turn()]
    assert taken in ([0] * 20 + [1] * 20, [1] * 20 + [0] * 20)
