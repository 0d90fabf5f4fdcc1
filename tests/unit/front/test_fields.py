"""Every field of vLLM's request models has a verdict, and docs/fields.md gives it."""

import re
from pathlib import Path

import pytest

from gateway.config import ServerConfig
from gateway.core.errors import InvalidRequest
from gateway.core.front.json_body import ACTED_ON, REFUSED, JsonLimits, parse_body, refuse_fields
from gateway.core.turns import at_once

PAGE = Path(__file__).resolve().parents[3] / "docs" / "fields.md"
ROW = re.compile(r"\| (`\w+`(?:, `\w+`)*) \| ([a-z ]+) \| (.+) \|")
# The fields of the request models of vLLM 0.32 and 0.33, by endpoint; `pooling` stands for all pooling endpoints.
MODELS = {
    "chat": """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
        chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty ignore_eos
        include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
        logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_payload
        mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt_logprobs reasoning_effort
        repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_prompt_text
        return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id
        skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
        structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
        truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
    """,
    "completions": """
        add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty
        ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
        logprobs max_tokens min_p min_tokens mm_payload model n presence_penalty priority prompt prompt_embeds
        prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs
        return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id
        skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
        structured_outputs suffix temperature thinking_token_budget top_k top_p truncate_prompt_tokens
        truncation_side use_beam_search user vllm_xargs watermarking
    """,
    "responses": """
        background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages frequency_penalty
        ignore_eos include include_reasoning include_stop_str_in_output input instructions kv_transfer_params
        logit_bias max_output_tokens max_tool_calls media_io_kwargs metadata min_p mm_payload mm_processor_kwargs
        model parallel_tool_calls presence_penalty previous_input_messages previous_response_id priority prompt
        prompt_cache_key reasoning repetition_penalty request_id return_mm_kwargs seed service_tier session_id
        skip_special_tokens stop stop_token_ids store stream structured_outputs temperature text tool_choice tools
        top_k top_logprobs top_p truncation user vllm_xargs watermarking
    """,
    "messages": """
        cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params max_tokens messages metadata
        mm_payload model output_config return_mm_kwargs stop_sequences stream system temperature thinking
        tool_choice tools top_k top_p vllm_xargs watermarking
    """,
    "pooling": """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message data data_1 data_2 dimensions documents embed_dtype encoding_format endianness input
        instruction items max_tokens_per_doc max_tokens_per_query media_io_kwargs messages mm_processor_kwargs model
        padding priority queries query request_id task text_1 text_2 top_n truncate_prompt_tokens truncation_side
        use_activation user
    """,
    "tokenize": """
        add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
        media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tokens tools
    """,
}


def rows() -> list[tuple[str, str, str]]:
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [(name, verdict, why) for names, verdict, why in found for name in re.findall(r"\w+", names)]


@pytest.mark.parametrize("endpoint", MODELS)
def test_every_field_of_vllms_request_models_has_one_verdict(endpoint: str) -> None:
    verdicts = [name for name, _, _ in rows()]
    assert [name for name in MODELS[endpoint].split() if verdicts.count(name) != 1] == []


def test_the_page_says_what_the_code_does() -> None:
    table = {verdict: {name: why for name, each, why in rows() if each == verdict} for _, verdict, _ in rows()}
    assert table["acted on"].keys() == ACTED_ON
    assert table["refused"] == REFUSED
    assert table.keys() == {"acted on", "refused", "passed"}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("value", ['{"remote_host":"10.0.0.1"}', "null", '"a"'])
def test_a_refused_field_is_refused_with_any_value(name: str, value: str) -> None:
    for body in (f'{{"model":"m","{name}":{value}}}', f'{{"model":"m","vllm_xargs":{{"a":1,"{name}":{value}}}}}'):
        with pytest.raises(InvalidRequest, match=re.escape(REFUSED[name])) as refused:
            at_once(parse_body(body.encode(), JsonLimits(ServerConfig())))
        assert refused.value.param == name


def test_other_arguments_for_the_engine_are_passed_on() -> None:
    refuse_fields({"model": "m", "vllm_xargs": {"kv_cache_report_mode": "full"}, "user": "kv_transfer_params"})
    refuse_fields({"vllm_xargs": ["request_id"]})
