"""What each vLLM metric is for, as its HELP line says."""

from types import MappingProxyType
from typing import Final

TEXTS: Final = MappingProxyType(
    {
        "vllm:num_requests_running": "Requests in the running batch.",
        "vllm:num_requests_waiting": "Requests in the queue.",
        "vllm:num_requests_waiting_by_reason": "Requests in the queue, by what they wait for.",
        "vllm:engine_sleep_state": "Whether the engine is awake, or which sleep level it is in.",
        "vllm:kv_cache_usage_perc": "Share of the KV cache in use; 1 is all of it.",
        "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
        "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
        "vllm:external_prefix_cache_queries": "Prompt tokens looked up in a shared cache.",
        "vllm:external_prefix_cache_hits": "Prompt tokens found in a shared cache.",
        "vllm:mm_cache_queries": "Multi-modal items looked up.",
        "vllm:mm_cache_hits": "Multi-modal items found.",
        "vllm:num_preemptions": "Preemptions.",
        "vllm:prompt_tokens": "Prefilled tokens.",
        "vllm:prompt_tokens_by_source": "Prompt tokens by where their KV came from.",
        "vllm:prompt_tokens_cached": "Prompt tokens found in a cache.",
        "vllm:prompt_tokens_cached_by_source": "Prompt tokens found in a cache, by cache tier.",
        "vllm:generation_tokens": "Generated tokens.",
        "vllm:request_success": "Ended requests, by reason.",
        "vllm:admission_rejections": "Requests refused by a queue limit, by reason.",
        "vllm:request_prompt_tokens": "Prompt tokens of a request.",
        "vllm:request_generation_tokens": "Generated tokens of a request.",
        "vllm:iteration_tokens_total": "Tokens of an engine step.",
        "vllm:request_max_num_generation_tokens": "Longest answer of a request.",
        "vllm:request_params_n": "The n that was asked for.",
        "vllm:request_params_max_tokens": "The max_tokens that was asked for.",
        "vllm:time_to_first_token_seconds": "From arrival to the first token.",
        "vllm:inter_token_latency_seconds": "From token to token.",
        "vllm:request_time_per_output_token_seconds": "Mean time a token of a request, the first excluded.",
        "vllm:e2e_request_latency_seconds": "From arrival to the last token.",
        "vllm:request_queue_time_seconds": "From arrival to the first scheduling.",
        "vllm:request_inference_time_seconds": "From the first scheduling to the last token.",
        "vllm:request_prefill_time_seconds": "From the first scheduling to the first token.",
        "vllm:request_decode_time_seconds": "From the first token to the last.",
        "vllm:request_num_preemptions": "Preemptions of a request.",
        "vllm:request_prefill_kv_computed_tokens": "Prompt tokens of a request not found in a cache.",
        "vllm:cache_config_info": "The cache configuration, in labels.",
    }
)
