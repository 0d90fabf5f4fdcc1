"""An engine goes on with an answer from the token ids of its prompt and its beginning, as a model at temperature 0."""

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

LIMIT = 40


def chat(nonce: str = "") -> dict[str, Any]:
    content = f"Say something about the old cat. {nonce}"
    return {"model": "sim", "messages": [{"role": "user", "content": content}], "max_tokens": LIMIT}


async def whole(client: AsyncOpenAI, **body: Any) -> tuple[str, list[int], list[int], str]:
    """Text, token ids of prompt and answer, and finish reason."""
    answer = await client.chat.completions.create(**body, extra_body={"return_token_ids": True})
    choice: Any = answer.choices[0]
    return choice.message.content, answer.prompt_token_ids, choice.token_ids, choice.finish_reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("said", [1, 2, 7, 15, 30])
@pytest.mark.parametrize("nonce", ["", "nonce:abcdefgh"])
async def test_a_chat_goes_on_where_the_token_ids_end(client: AsyncOpenAI, said: int, nonce: str) -> None:
    text, prompt, ids, reason = await whole(client, **chat(nonce))
    said = min(said, len(ids) - 1)
    forwarded = {"kv_transfer_params": {"prompt_token_ids": prompt + ids[:said]}, "return_token_ids": True}
    body = chat(nonce) | {"max_tokens": LIMIT - said}
    answer: Any = await client.chat.completions.create(**body, extra_body=forwarded)
    assert answer.prompt_token_ids == prompt + ids[:said]
    assert answer.choices[0].token_ids == ids[said:]
    assert answer.choices[0].finish_reason == reason
    assert text.endswith(answer.choices[0].message.content)
    assert answer.usage.prompt_tokens == len(prompt) + said
    assert answer.usage.completion_tokens == len(ids) - said


async def test_a_completion_goes_on_where_the_token_ids_end(client: AsyncOpenAI) -> None:
    extra = {"return_token_ids": True}
    first: Any = await client.completions.create(model="sim", prompt="A text", max_tokens=LIMIT, extra_body=extra)
    prompt, ids = first.choices[0].prompt_token_ids, first.choices[0].token_ids
    for said in range(1, len(ids)):
        rest: Any = await client.completions.create(
            model="sim", prompt=prompt + ids[:said], max_tokens=LIMIT - said, extra_body=extra
        )
        assert rest.choices[0].token_ids == ids[said:]


@pytest.mark.parametrize("ids", [[], [-1], ["a"], [True], "abc"])
async def test_token_ids_that_are_none_are_refused_by_name(client: AsyncOpenAI, ids: Any) -> None:
    with pytest.raises(BadRequestError) as refusal:
        await client.chat.completions.create(**chat(), extra_body={"kv_transfer_params": {"prompt_token_ids": ids}})
    assert refusal.value.param == "kv_transfer_params.prompt_token_ids"


async def test_other_parameters_of_transfers_have_no_effect(client: AsyncOpenAI) -> None:
    text, *_ = await whole(client, **chat())
    answer = await client.chat.completions.create(
        **chat(), extra_body={"kv_transfer_params": {"do_remote_decode": True}}
    )
    assert answer.choices[0].message.content == text
