"""Files and batches as values: what is stored of each, and how OpenAI's API shows it."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, NamedTuple

import orjson

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")  # the other states are final
OUTPUT = "batch_output"  # the purpose of files that the gateway writes
_STEPS = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class Owner(NamedTuple):
    """The API key and tenant that files and batches belong to; empty = the gateway has no keys."""

    key: str
    tenant: str


class StoredFile(NamedTuple):
    """A complete file. Times are Unix seconds."""

    id: str
    owner: Owner
    filename: str
    purpose: str
    size_bytes: int
    created_at: int
    expires_at: int

    @classmethod
    def of_row(cls, row: tuple[Any, ...]) -> "StoredFile":
        """A file as a database has it: its fields in order, with those of the owner in their place."""
        file_id, key, tenant, filename, purpose, size_bytes, created_at, expires_at = row
        return cls(
            file_id,
            Owner(key, tenant),
            filename=filename,
            purpose=purpose,
            size_bytes=size_bytes,
            created_at=created_at,
            expires_at=expires_at,
        )

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


class LineUsage(NamedTuple):
    """The tokens of one answer."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Tally:
    """Lines that have an answer, and the tokens of all of them."""

    completed: int = 0
    failed: int = 0
    _: KW_ONLY
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def lines(self) -> int:
        return self.completed + self.failed

    def add(self, usage: LineUsage, *, failed: bool) -> None:
        """Count one line with an answer, or with an error."""
        self.failed += failed
        self.completed += not failed
        self.input_tokens += usage.input_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.output_tokens
        self.reasoning_tokens += usage.reasoning_tokens

    def add_all(self, other: "Tally") -> None:
        """Count the lines of another gateway, too."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

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
    return orjson.dumps({"tally": asdict(tally), "paused": paused}).decode()


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

    def begin(self, model: str, total: int, now: int) -> None:
        """The input file is valid. A batch that was interrupted keeps its state."""
        self.model, self.total = model, total
        if self.status == "validating":
            self._reach("in_progress", now)

    def fail(self, errors: list[dict[str, Any]], now: int) -> None:
        self.errors = errors
        self._reach("failed", now)

    def cancel(self, now: int) -> None:
        """No more lines are started; those in flight end."""
        self.ends_as = "cancelled"
        self._reach("cancelling", now)

    def finalize(self, ends_as: str, now: int) -> None:
        self.ends_as = ends_as
        self._reach("finalizing", now)

    def end(self, output_file_id: str | None, error_file_id: str | None, now: int) -> None:
        """All that will be known of it is in these files; None = the file would be empty."""
        self.output_file_id, self.error_file_id = output_file_id, error_file_id
        self.paused = self.promoted = ""
        self._reach(self.ends_as, now)

    def recount(self, tally: Tally) -> None:
        """Take over what its files were found to have."""
        self.tally = tally

    def pause(self, reason: str) -> None:
        self.paused = reason

    def go_on(self) -> None:
        self.paused = ""

    def promote(self, to_class: str) -> None:
        """Its lines use more than idle capacity from now on; empty = no longer."""
        self.promoted = to_class

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
            self.tally = Tally()
        for each in found:
            self.tally.add_all(Tally(**each["tally"]))

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


def result_file(batch: Batch, name: str, file_id: str, size_bytes: int, now: int, lifetime_seconds: int) -> StoredFile:
    """A file of a batch's answers; `lifetime_seconds` holds if the batch sets none."""
    expires_at = now + (batch.output_lifetime_seconds or lifetime_seconds)
    return StoredFile(
        file_id,
        batch.owner,
        filename=f"{batch.id}_{name}.jsonl",
        purpose=OUTPUT,
        size_bytes=size_bytes,
        created_at=now,
        expires_at=expires_at,
    )
