"""No secret is written down, and what is none stays."""

import pytest

from loadtest.checkpoint.redaction import HIDDEN, command, document, environment, is_secret, text

SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    "name",
    [
        "--api-key",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "hfToken",
        "apiKey",
        "db-password",
        "Authorization",
        "OPENAI_API_KEY",
        "cache_salt_secret",
        "auth_token",
        "SENTRY_DSN",
    ],
)
def test_a_name_that_holds_a_secret_is_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "--tokenizer",
        "--max-num-batched-tokens",
        "max_tokens",
        "--kv-cache-dtype",
        "TOKENIZERS_PARALLELISM",
        "--ssl-keyfile",
        "monkey",
        "--author",
        "kv_cache_tokens",
        "--enable-prompt-tokens-details",
    ],
)
def test_a_name_that_only_looks_like_one_is_not(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "m", "--api-key", SECRET],
        ["vllm", "serve", "m", f"--api-key={SECRET}"],
        ["vllm", "serve", "m", "--api-key", SECRET, SECRET, "--port", "8000"],
        ["env", f"HF_TOKEN={SECRET}", "vllm", "serve", "m"],
        ["vllm", "serve", "m", "--kv-transfer-config", f'{{"kv_connector": "x", "extra": {{"password": "{SECRET}"}}}}'],
        ["vllm", "serve", "m", f'--kv-transfer-config={{"auth": "{SECRET}"}}'],
        ["loadtest", "run", "--header", f"X-Team:{SECRET}", "http://host"],
        ["loadtest", "run", f"--header=x-team: {SECRET}", "http://host"],
        ["loadtest", "run", "--header", f"-{SECRET}", "http://host"],
        ["curl", "-H", f"Authorization: Bearer {SECRET}", "http://host"],
        ["gateway", "serve", "--backend", f"http://user:{SECRET}@10.0.0.1:8000"],
        ["loadtest", "run", f"http://host:8080/?api_key={SECRET}&model=m"],
        ["vllm", "serve", "m", "--download", "sk-abcdefghijklmnop"],
        ["vllm", "serve", "m", "--download", "hf_abcdefghijklmnop"],
    ],
)
def test_no_spelling_of_a_secret_in_a_command_is_shown(words: list[str]) -> None:
    shown = " ".join(command(words))
    assert HIDDEN in shown
    for secret in (SECRET, "sk-abcdefghijklmnop", "hf_abcdefghijklmnop"):
        assert secret not in shown


def test_the_rest_of_a_command_stays_as_it_is() -> None:
    words = [
        "vllm",
        "serve",
        "/models/llama",
        "--port",
        "8000",
        "--kv-events-config",
        '{"publisher": "zmq"}',
        "--max=1",
    ]
    assert command(words) == words
    assert command([*words, "--api-key", SECRET, "--seed", "7"]) == [*words, "--api-key", HIDDEN, "--seed", "7"]


def test_variables_are_judged_by_name_and_by_what_they_hold() -> None:
    shown = environment(
        {
            "HF_TOKEN": SECRET,
            "VLLM_API_KEY": SECRET,
            "HF_HUB_OFFLINE": "1",
            "EMPTY_TOKEN": "",
            "HTTP_PROXY": f"http://me:{SECRET}@proxy:3128",
            "OMP_NUM_THREADS": "4",
        }
    )
    assert SECRET not in str(shown)
    assert shown["HF_TOKEN"] == shown["VLLM_API_KEY"] == HIDDEN
    assert shown["HF_HUB_OFFLINE"] == "1"
    assert shown["OMP_NUM_THREADS"] == "4"
    assert shown["HTTP_PROXY"] == f"http://{HIDDEN}@proxy:3128"


def test_a_document_keeps_its_shape_and_loses_its_secrets() -> None:
    found = {
        "auth": {"keys": [{"name": "team-a", "key": SECRET, "weight": 2.0}]},
        "backends": [{"url": "http://a:8000", "api_key": SECRET}],
        "keys": [SECRET],
        "password": 12345,
        "eos_token_id": 2,
        "max_tokens": 5,
        "token": None,
    }
    shown = document(found)
    assert SECRET not in str(shown)
    assert (shown["password"], shown["eos_token_id"]) == (HIDDEN, 2)
    assert shown["auth"]["keys"][0] == {"name": "team-a", "key": HIDDEN, "weight": 2.0}
    assert shown["backends"][0]["url"] == "http://a:8000"
    assert (shown["max_tokens"], shown["token"]) == (5, None)


def test_plain_text_is_not_touched() -> None:
    assert text("a greedy answer: 12 = 3 * 4, see http://host/path?model=m") == (
        "a greedy answer: 12 = 3 * 4, see http://host/path?model=m"
    )
