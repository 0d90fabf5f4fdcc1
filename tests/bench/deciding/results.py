"""Timings of decisions, as they are kept."""

from pydantic import BaseModel, ConfigDict

from loadtest.console import markdown_table


class Timing(BaseModel):
    """One thing that was done many times."""

    model_config = ConfigDict(frozen=True)

    name: str
    runs: int
    median_us: float
    p99_us: float
    goal_us: float | None = None
    """For the median."""

    @property
    def met(self) -> bool | None:
        """Whether the goal is; None without one."""
        return None if self.goal_us is None else self.median_us <= self.goal_us


def table(timings: list[Timing]) -> str:
    judged = {True: "met", False: "**not met**", None: ""}
    goals = ("" if one.goal_us is None else f"≤ {one.goal_us:,.0f}" for one in timings)
    rows = [
        (one.name, f"{one.median_us:,.1f}", f"{one.p99_us:,.1f}", goal, judged[one.met])
        for one, goal in zip(timings, goals, strict=True)
    ]
    return markdown_table(("decision", "median, µs", "p99, µs", "goal, µs", ""), rows, texts=1)
