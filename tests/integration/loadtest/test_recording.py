"""Traffic through a gateway, recorded from its access log, and read as a trace."""

import subprocess
import sys
from pathlib import Path

from loadtest.workloads.trace import Row, read_trace
from tests.integration.fleet import CHAT_MODEL, Fleet
from tests.integration.gateway_process import config_for, running_gateway

BLOCK_TOKENS = 64
SYSTEM = "You answer questions about rivers, lakes and the sea, in short and plain sentences. " * 40


def recorded(folder: Path) -> list[Row]:
    """The requests that the gateway's log in this folder tells of."""
    [log] = folder.glob("gateway-*.log")
    assert b"rivers" not in log.read_bytes()
    out = folder / "trace.jsonl"
    command = [sys.executable, "-m", "loadtest", "record", str(log), "--out", str(out)]
    subprocess.run([*command, "--block-size", str(BLOCK_TOKENS)], check=True)
    return read_trace(out, BLOCK_TOKENS).rows


async def test_a_trace_of_real_requests_shares_what_they_share(fleet: Fleet, tmp_path: Path) -> None:
    sections = {"server": {"access_log_prefixes": True}}
    with running_gateway(tmp_path, config_for(fleet, sections, {})) as gateway:
        async with gateway.client() as client:
            for system, question in ((SYSTEM, "Which one?"), (SYSTEM, "And that?"), (SYSTEM[::-1], "Which one?")):
                await client.chat.completions.create(
                    model=CHAT_MODEL,
                    messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
                    max_tokens=4,
                )
    one, same, other = recorded(tmp_path)
    assert one.output_tokens == same.output_tokens == 4
    shared = sum(ours == theirs for ours, theirs in zip(one.keys, same.keys, strict=False))
    assert shared >= min(len(one.keys), len(same.keys)) - 1 > 3
    assert not set(one.keys) & set(other.keys)
