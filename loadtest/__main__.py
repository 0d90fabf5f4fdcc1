"""`loadtest`, or `python -m loadtest`: its commands."""

import typer

from loadtest.checkpoint.command import verify
from loadtest.compare.command import compare_command
from loadtest.compare.options import OF_RUN, CompareOptions
from loadtest.console import parameters_of, with_options
from loadtest.drive.command import run
from loadtest.drive.options import RunOptions
from loadtest.engine.command import SimOptions, sim
from loadtest.figures.command import figures
from loadtest.predict.command import predict_command
from loadtest.recording import record
from loadtest.replay.command import replay
from loadtest.replay.options import ReplayOptions
from loadtest.report.command import report
from loadtest.sweep.command import sweep

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Drive load at anything that speaks OpenAI's API (`run`), compare what came of runs (`report`), check again"
    " what a run has kept (`verify`), find the settings of vLLM that serve a load best (`sweep`), compare the gateway"
    " with other proxies (`compare`), stand in for a vLLM server (`sim`), draw what batching does (`figures`),"
    " or replay a recorded trace through routing"
    " policies (`replay`); such a trace is made of a gateway's access log, or requests are kept by a proxy (`record`);"
    " how near a replay comes to"
    " `predict` compares with measurements.",
    epilog="Such as: loadtest sim --port 8000, and in another terminal: loadtest run http://127.0.0.1:8000 -c 64 -d 30",
)


app.command("sim")(with_options(sim, SimOptions))
app.command("figures")(figures)
app.command("run")(with_options(run, RunOptions))
app.command("verify")(verify)
app.command("sweep")(sweep)
app.command("compare")(with_options(compare_command, CompareOptions, parameters_of(RunOptions, OF_RUN)))
app.command("replay")(with_options(replay, ReplayOptions))
app.command("record")(record)
app.command("predict")(predict_command)
app.command("report")(report)


def main() -> None:
    """Entry point of the `loadtest` command."""
    app()


if __name__ == "__main__":
    main()
