"""The crowds that are compared: what binds is another thing with each of them."""

from tests.bench.limits.closed_loop import Crowd

ALL = (
    Crowd("long answers", prompt_tokens=1000, output_tokens=2000, kv_tokens=120_000),
    Crowd("long prompts", prompt_tokens=6000, output_tokens=300, kv_tokens=430_000),
    Crowd("small KV cache", prompt_tokens=1500, output_tokens=600, kv_tokens=30_000),
    Crowd("64 seats", prompt_tokens=500, output_tokens=300, kv_tokens=430_000, max_num_seqs=64),
    Crowd("1024 seats", prompt_tokens=300, output_tokens=400, kv_tokens=430_000),
    Crowd("objective 30 ms", prompt_tokens=300, output_tokens=400, kv_tokens=430_000, itl_objective_seconds=0.03),
    Crowd("metrics 4 s late", prompt_tokens=1000, output_tokens=2000, kv_tokens=120_000, late_looks=2),
)
