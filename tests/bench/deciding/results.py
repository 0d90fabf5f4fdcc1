"""Timings of decisions, as they are kept."""

from pydantic import BaseModel, ConfigDict


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
    """One line a timing."""
    lines = ["| decision | median, µs | p99, µs | goal, µs | |", "| --- | --: | --: | --: | --- |"]
    judged = {True: "met", False: "**not met**", None: ""}
    for one in timings:
        goal = "" if one.goal_us is None else f"≤ {one.goal_us:,.0f}"
        lines.append(f"| {one.name} | {one.median_us:,.1f} | {one.p99_us:,.1f} | {goal} | {judged[one.met]} |")
    return "\n".join(lines)
