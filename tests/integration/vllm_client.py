"""vLLM's own client, `vllm bench serve`, once for each line of arguments. Runs inside the engine's environment.

Arguments are a JSON list on a line of standard input, results a JSON object on a line of standard output. One process
makes all runs, because importing vLLM takes longer than a run does.
"""

import json
import sys
from importlib import import_module  # vLLM exists in the engine's environment alone


def serve_lines() -> None:
    """Ends with its standard input."""
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM prints tables
    serve, argparse_utils = (import_module(f"vllm.{name}") for name in ("benchmarks.serve", "utils.argparse_utils"))
    parser = argparse_utils.FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for line in sys.stdin:
        results = serve.main(parser.parse_args(json.loads(line)))
        plain = {name: value for name, value in results.items() if isinstance(value, int | float)}
        answers.write(json.dumps(plain) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve_lines()
