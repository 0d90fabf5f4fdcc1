"""Files and batches as values: what is stored of each, and how OpenAI's API shows it."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import orjson

RUNNING = ("validating", "in_progress", "finalizing", "cancelling")  # the other states are final
OUTPUT = "batch_output"  # the purpose of files that the gateway writes
_STEPS = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class Owner(NamedTuple):
    """The API key and tenant that files and batches belong to; empty = the gateway has no keys."""

    key: str
    tenant: str


class StoredFile(NamedTuple):
    """A complete file, as a database has it. Times are Unix seconds."""

    id: str
    key: str
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: int
    expires_at: int

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class Tally:
    """Lines that have an answer or an error, and the tokens of all answers."""

    completed: int = 0
    failed: int = 0
    _: KW_ONLY
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    @property
    def lines(self) -> int:
        return self.completed + self.failed

    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


def report_of(tally: Tally, paused: str = "") -> str:
    """What a gateway reports of a claim."""
    return orjson.dumps({"tally": tally, "paused": paused}).decode()


def batch_error(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """An entry of a failed batch's `errors`. `line`: of the input file, from 1."""
    return {"code": code, "message": message, "param": param, "line": line}


@dataclass(slots=True)
class Batch:
    """One batch. It changes by its methods only; the runner that runs it calls them.

    `output_file_id`, `error_file_id`: known once it has ended, if they have lines. `ends_as`: the final state that it
    is being finalized for. `reports`: of gateways, by the first line of the claim that each is about; while it runs,
    `tally` is their sum.
    """

    id: str
    _: KW_ONLY
    owner: Owner
    endpoint: str
    input_file_id: str
    window: str
    metadata: dict[str, str] | None
    output_lifetime_seconds: int
    created_at: int
    expires_at: int
    status: str = "validating"
    ends_as: str = ""
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    at: dict[str, int] = field(default_factory=dict)  # when it reached each state
    tally: Tally = field(default_factory=Tally)
    output_file_id: str | None = None
    error_file_id: str | None = None
    paused: str = ""  # why it does not go on at the moment
    promoted: str = ""  # the class of its lines, once its window leaves too little time for idle capacity alone
    reports: dict[int, str] = field(default_factory=dict, compare=False)

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING

    def begin(self, model: str, total: int, now: int) -> bool:
        """The first gateway found the input file valid. A batch that was cancelled meanwhile keeps its state."""
        if self.total or not self.is_running:
            return False
        self.model, self.total = model, total
        if self.status == "validating":
            self._reach("in_progress", now)
        return True

    def fail(self, errors: list[dict[str, Any]], now: int) -> None:
        self.errors = errors
        self._reach("failed", now)

    def cancel(self, now: int) -> bool:
        """No more lines are started; those in flight end. False = it has been cancelled, or is beyond that."""
        if self.status not in ("validating", "in_progress"):
            return False
        self.ends_as = "cancelled"
        self._reach("cancelling", now)
        return True

    def finalize(self, now: int, *, is_complete: bool) -> bool:
        """No more lines are run: all have an answer, or its window has closed. False = it was finalized before."""
        if self.status != "in_progress" and (self.ends_as != "completed" or is_complete):
            return False
        self.ends_as = "completed" if is_complete else "expired"
        self._reach("finalizing", now)
        return True

    def end(self, tally: Tally, output_file_id: str | None, error_file_id: str | None, now: int) -> None:
        """All that will be known of it is in these files, which have `tally`; None = the file would be empty."""
        self.tally, self.output_file_id, self.error_file_id = tally, output_file_id, error_file_id
        self.paused = self.promoted = ""
        self._reach(self.ends_as, now)

    def show(self, paused: str, promoted: str) -> None:
        """Take over why it is paused on one gateway, if it is there, and what its lines use there."""
        self.paused, self.promoted = paused or self.paused, promoted

    def _reach(self, status: str, now: int) -> None:
        self.status = status
        self.at[status] = now

    def document(self) -> dict[str, Any]:
        at = {**self.at, "expires": self.expires_at}
        shown = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            **{f"{step}_at": at.get(step) for step in _STEPS},
            "request_counts": {"total": self.total, "completed": self.tally.completed, "failed": self.tally.failed},
            "usage": self.tally.usage(),
            "metadata": self.metadata,
        }
        extensions = {"paused": self.paused, "promoted": self.promoted}
        return shown | {name: value for name, value in extensions.items() if value}

    def add_reports(self, reports: Mapping[int, str]) -> None:
        """Take over reports, which replace older ones of the same claims; an empty one says nothing."""
        self.reports |= {first: report for first, report in reports.items() if report}
        found = [orjson.loads(report) for report in self.reports.values()]
        self.paused = next((each["paused"] for each in found if each["paused"]), "")
        if found:
            self.tally = sum([Tally(**each["tally"]) for each in found], Tally())

    def stored(self) -> str:
        """All fields that last; `restored` is the reverse."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in ("paused", "reports")}
        return orjson.dumps(fields | {"owner": [*self.owner]}).decode()

    @classmethod
    def restored(cls, stored: str, reports: Mapping[int, str] | None = None) -> "Batch":
        fields = orjson.loads(stored)
        batch = cls(**{**fields, "owner": Owner._make(fields["owner"]), "tally": Tally(**fields["tally"])})
        batch.add_reports(reports or {})
        return batch
