"""The labels of `vllm:cache_config_info`: every field of vLLM's CacheConfig."""

from loadtest.engine.config import EngineConfig


def cache_config_labels(config: EngineConfig, rank: int) -> dict[str, str]:
    """The labels and their values for one data-parallel rank; those the gateway reads tell the simulated cache."""
    limits = config.limits
    tokens = None if config.embedding else limits.num_blocks * limits.block_size  # encoders have no KV cache
    values: dict[str, object] = {
        "_block_size_resolved": True,
        "block_size": limits.block_size,
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": None,
        "effective_attention_block_size": limits.block_size,
        "enable_mamba_shared_prefix_checkpoint": False,
        "enable_prefix_caching": limits.prefix_caching and not config.embedding,
        "engine": rank,
        "gpu_memory_utilization": 0.92,
        "hash_block_size": None,
        "is_attention_free": False,
        "kv_cache_dtype_skip_layers": [],
        "kv_cache_layout": None,
        "kv_cache_max_concurrency": None if tokens is None else tokens / config.max_model_len,
        "kv_cache_memory_bytes": None,
        "kv_cache_size_tokens": tokens,
        "kv_offloading_backend": "native",
        "kv_offloading_size": None,
        "kv_sharing_fast_prefill": False,
        "mamba_block_size": None,
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": None,
        "mamba_ssm_cache_dtype": "auto",
        "num_cpu_blocks": None,
        "num_gpu_blocks": 1 if config.embedding else limits.num_blocks,
        "num_gpu_blocks_override": None,
        "prefix_cache_retention_interval": 0,
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": None,
        "replayssm_buffer_len": 16,
        "skip_page_size_padded": None,
        "sliding_window": None,
        "swa_bounded_replay": True,
        "use_kda_recoverssm": False,
        "use_replayssm": False,
        "user_specified_block_size": True,
    }
    return {name: str(value) for name, value in values.items()}
