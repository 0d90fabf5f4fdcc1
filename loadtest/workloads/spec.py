"""The description of a workload, as asked for and as recorded with the results."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class WorkloadKind(StrEnum):
    """The shapes of prompt there are."""

    SHARED_PREFIX = "shared-prefix"
    PREFIX_REPETITION = "prefix-repetition"
    UNIQUE = "unique"
    SESSIONS = "sessions"
    SHAREGPT = "sharegpt"
    TEXTS = "texts"
    TRACE = "trace"


WITH_PREFIX = (WorkloadKind.SHARED_PREFIX, WorkloadKind.PREFIX_REPETITION, WorkloadKind.SESSIONS)


class SourceFile(BaseModel):
    """A file that prompts are made from, and what was in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    sha256: str


class WorkloadSpec(BaseModel):
    """Sizes are asked in tokens and approximated by bytes; the report says what the server counted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: WorkloadKind = WorkloadKind.SHARED_PREFIX
    groups: int = Field(default=8, ge=1, description="Distinct shared prefixes.")
    prefix_tokens: int = Field(default=1024, ge=1, description="Tokens every request of a group shares.")
    tail_tokens: int = Field(default=64, ge=1, description="Tokens only this request has.")
    bytes_per_token: float = Field(default=4.5, gt=0, description="How many bytes of prose make a token.")
    max_tokens: int = Field(default=128, ge=1, description="Output length.")
    output_spread: float = Field(default=0.0, ge=0, lt=1, description="Output lengths vary by this share, evenly.")
    seed: int = 0
    turns: tuple[int, int] = Field(default=(2, 6), description="Fewest and most turns of a session.")
    think_seconds: float = Field(default=0.0, ge=0, description="Mean pause between an answer and the next turn.")
    inputs: tuple[int, int] = Field(default=(1, 1), description="Fewest and most texts of a request (texts).")
    file: SourceFile | None = Field(default=None, description="The trace, or the dataset.")
    block_tokens: int | None = Field(default=None, ge=1, description="Tokens of a hash_ids block, if not the format's.")

    @property
    def prompt_tokens(self) -> int:
        """Tokens asked for in one prompt, where all are alike."""
        return self.tail_tokens + (self.prefix_tokens if self.kind in WITH_PREFIX else 0)
