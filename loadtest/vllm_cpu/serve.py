"""One real vLLM engine on this machine's CPU, in the foreground: `python -m loadtest.vllm_cpu.serve --help`."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from loadtest.servers.server import ServerFailed
from loadtest.vllm_cpu.process import DEFAULT_VENV, VllmOptions, VllmProcess

POLL_SECONDS = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(engine: VllmProcess) -> None:
    """Serve until a signal stops it, or the process that started this one has ended. Raises ServerFailed."""
    parent = os.getppid()
    try:
        engine.start()
        engine.wait_ready()
        while os.getppid() == parent:
            if not engine.is_running():
                raise ServerFailed(f"the engine at {engine.url} has ended", engine.log_end())
            time.sleep(POLL_SECONDS)
    finally:
        engine.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: 0 stopped, 1 the engine could not start or has ended."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.vllm_cpu.serve", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--port", type=int, required=True, help="port of 127.0.0.1 to listen at")
    parser.add_argument("--log", type=Path, required=True, help="file for the engine's log")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="sequences at once (default: %(default)s)")
    parser.add_argument("--venv", type=Path, default=DEFAULT_VENV, help="where vLLM is (default: %(default)s)")
    asked = parser.parse_args(argv)
    options = VllmOptions(asked.model, venv_dir=asked.venv, port=asked.port, max_num_seqs=asked.max_num_seqs)
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    try:
        serve(VllmProcess(options, asked.log, lambda line: print(line, flush=True)))  # noqa: T201
    except KeyboardInterrupt:
        return 0
    except ServerFailed as failed:
        sys.stderr.write(f"{failed}\n")
        return 1
    return 0


def _stop(_number: int, _frame: FrameType | None) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
