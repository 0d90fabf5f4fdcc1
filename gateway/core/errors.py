"""The errors of a request, each with its HTTP status and OpenAI's type and code.

Other exceptions are converted to these once, in `relay/`; these are rendered once, in `front/reply.py`.
"""

from typing import Any, ClassVar, Self, TypeVar

_REQUEST_IS_AT_FAULT = frozenset(range(400, 500)) - {408, 409, 429}
_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "internal_error",
    502: "upstream_error",
    503: "service_unavailable_error",
    504: "upstream_error",
}  # the others: "invalid_request_error"


class GatewayError(Exception):
    """Base class of all request errors; only leaves are raised. A subclass states the differences."""

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"  # follows from the status, unless a class states its own
    code: ClassVar[str | None] = None
    outcome: ClassVar[str] = "rejected"
    not_retryable: bool = False  # the same request would fail again
    in_bursts: ClassVar[bool] = False  # many clients together: their retries are spread out

    def __init_subclass__(cls, **differences: Any) -> None:
        if "status" in differences:
            differences.setdefault("type", _TYPES.get(differences["status"], "invalid_request_error"))
        for name, value in differences.items():
            setattr(cls, name, value)

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        not_retryable: bool = False,
        model: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.model = model  # its backends belong in the message
        self.retry_after_seconds = retry_after_seconds
        if not_retryable or self.status in _REQUEST_IS_AT_FAULT:
            self.not_retryable = True

    def again(self) -> Self:
        """A copy to raise of an error that is kept: a traceback holds the memory of its frames."""
        error = type(self).__new__(type(self), *self.args)
        error.__dict__.update(self.__dict__)
        return error

    def reword(self, message: str) -> None:
        """Say more than the code that raised the error knew."""
        self.message = message

    def retry_after(self, seconds: float | None) -> None:
        """Set when the client should retry, which the code that raised the error did not know."""
        self.retry_after_seconds = seconds


Outcome = TypeVar("Outcome")


def unwrapped(outcome: Outcome | GatewayError) -> Outcome:
    """The outcome of a future, or raises its error.

    Futures have errors as results: an exception of theirs would hold, by its traceback, the frames that hold the
    future, and these all that the request has in memory.
    """
    if isinstance(outcome, GatewayError):
        raise outcome.again()
    return outcome


class InvalidRequest(GatewayError):
    """The request is invalid. Retrying it unchanged cannot succeed."""


class ContextTooComplex(InvalidRequest, code="context_too_complex"):
    """The body has more strings, values, objects or levels than a body may have; a shorter conversation has fewer."""

    @classmethod
    def of(cls, most: int, what: str) -> Self:
        return cls(f"The prompt is too long: the body exceeds the limit of {most} {what}.")


class PreviousResponseNotFound(GatewayError, status=400, code="previous_response_not_found"):
    """The response to continue is unknown: send the whole input again. Code and status as at OpenAI."""

    @classmethod
    def of(cls, response_id: str) -> Self:
        return cls(f"Previous response with id {response_id!r} not found.", param="previous_response_id")


class ResponseNotFound(GatewayError, status=404, code="response_not_found"):
    """No response of this API key has this id."""

    @classmethod
    def of(cls, response_id: str) -> Self:
        return cls(f"Response with id {response_id!r} not found.")


class Unauthorized(GatewayError, status=401, code="invalid_api_key"):
    """The API key is missing or invalid."""


class KeyExpired(GatewayError, status=401, code="expired_api_key"):
    """The API key has expired."""


class ModelNotAllowed(GatewayError, status=403, code="model_not_found"):
    """The API key may not use this model; code and type as at OpenAI."""

    @classmethod
    def of(cls, model: str) -> Self:
        text = f"This API key does not have access to the model {model!r}. GET /v1/models lists the models it may use."
        return cls(text, param="model")


class HostNotAllowed(GatewayError, status=403, code="host_not_allowed"):
    """The `Host` header of an admin request is not an allowed name."""


class OriginNotAllowed(GatewayError, status=403, code="origin_not_allowed"):
    """A web page in a browser tried to change something on the admin port, or to open a realtime session."""


class BackendNotFound(GatewayError, status=404, code="backend_not_found"):
    """No backend has this name (admin port)."""


class BackendExists(GatewayError, status=409, code="backend_exists"):
    """A backend with this name or URL is there already (admin port)."""


class RouteNotFound(GatewayError, status=404, code="unknown_url"):
    """Unknown URL: no endpoint has this path."""


class MethodNotAllowed(GatewayError, status=405, code="method_not_allowed"):
    """The endpoint does not support this HTTP method."""

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class ModelNotFound(GatewayError, status=404, code="model_not_found"):
    """No backend serves this model."""

    @classmethod
    def of(cls, model: str) -> Self:
        text = f"The model {model!r} does not exist. GET /v1/models lists the available models."
        return cls(text, param="model", model=model)


class RequestTimeout(GatewayError, status=408, code="request_timeout"):
    """The client sent its request too slowly: a header, body or rate limit was exceeded."""


class BodyTooLarge(GatewayError, status=413, code="request_too_large"):
    """The request body exceeds the size limit."""


class UnsupportedEncoding(GatewayError, status=415, code="unsupported_content_encoding"):
    """Compressed request bodies are unsupported."""


class HeadersTooLarge(GatewayError, status=431, code="headers_too_large"):
    """The request line or the headers exceed a limit."""


class QueueFull(GatewayError, status=429, code="queue_full", outcome="queue_full", in_bursts=True):
    """All capacity is in use and the queue is full."""


class WaitExpired(GatewayError, status=429, code="queue_timeout", outcome="queue_timeout", in_bursts=True):
    """No capacity became available within the queue timeout."""


class RateLimited(GatewayError, status=429, code="rate_limit_exceeded", outcome="rate_limited"):
    """The API key exceeded its limit of requests or tokens per minute, or of concurrent requests."""


class QuotaExceeded(
    GatewayError,
    status=429,
    type="insufficient_quota",
    code="insufficient_quota",
    outcome="quota_exceeded",
    not_retryable=True,
):
    """The API key used up its tokens of the day or the month; they are renewed at the time in `retry-after`."""


class WebSocketRequired(GatewayError, status=426, code="websocket_required"):
    """The endpoint is a WebSocket, and the request does not ask for the upgrade."""


class SessionExpired(GatewayError, status=408, code="session_expired", outcome="session_expired"):
    """A realtime session was idle for too long, or reached its maximum duration."""


class DeadlineUnmeetable(
    GatewayError, status=429, code="deadline_exceeded", outcome="deadline_exceeded", not_retryable=True, in_bursts=True
):
    """No capacity will be available before the client's deadline."""


class NoBackend(GatewayError, status=503, code="no_backend_available", outcome="no_backend", in_bursts=True):
    """No backend can serve this model at the moment."""

    @classmethod
    def of(cls, model: str, when: str, retry_after_seconds: float | None = None) -> Self:
        text = f"No backend for model {model!r} was ready {when}."
        return cls(text, retry_after_seconds=retry_after_seconds, model=model)


class MemoryFull(GatewayError, status=503, code="memory_budget_exceeded", outcome="memory_full", in_bursts=True):
    """The memory budget of the gateway for requests is exceeded."""


class OutOfDescriptors(
    GatewayError, status=503, code="out_of_file_descriptors", outcome="out_of_descriptors", in_bursts=True
):
    """The gateway has no free file descriptor for a connection to a backend; not a failure of the backend."""


class Draining(GatewayError, status=503, code="shutting_down", outcome="draining"):
    """The gateway is shutting down."""


class InternalError(GatewayError, status=500, code="internal_error", outcome="internal_error"):
    """An internal error of the gateway (a bug)."""


class RestartFailed(GatewayError, status=500, code="restart_failed"):
    """The successor did not take over; this process continues."""


class WorkerUnreachable(GatewayError, status=503, code="worker_unreachable"):
    """A worker of this gateway does not answer its parent: it is starting, ending, or stuck."""


class BackendError(GatewayError, status=502, code="backend_failed", outcome="backend_error"):
    """A backend failed. `retryable`: another backend may be tried if no data has reached the client."""

    retryable: ClassVar[bool] = False
    ran: ClassVar[bool] = True  # False = the backend has certainly not executed the request
    passing: ClassVar[bool] = False  # typical of a backend that starts or stops: it may recover
    counts_as_failure: ClassVar[bool] = True
    answered: bool = False  # the backend itself reported the failure: the request may be at fault

    def __init__(
        self,
        message: str,
        *,
        retry_after_seconds: float | None = None,
        answered: bool = False,
        answer: Any = None,
        silent_since: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.silent_since = silent_since  # since when the request got no output, if that is its failure
        self.answered = self.answered or answered
        self.answer = answer  # the backend's response, if any: passed on when no retry is left

    @property
    def result(self) -> str:
        """The result of the attempt, in metrics."""
        return self.code or "failed"


class ConnectFailed(BackendError, code="backend_unreachable", retryable=True, passing=True, ran=False):
    """Could not connect to the backend; nothing was sent."""

    def __init__(self, message: str, *, kind: str = "refused") -> None:
        super().__init__(message)
        self.kind = kind  # refused, timeout, dns, tls or broken

    @property
    def result(self) -> str:
        return f"connect_{self.kind}"


class ReusedConnectionClosed(BackendError, retryable=True, counts_as_failure=False):
    """The backend closed a pooled connection before the first byte of a response: the usual keep-alive race."""


class FreshConnectionClosed(BackendError, retryable=True, passing=True):
    """The backend closed a new connection before the first byte of a response; the request may have crashed it."""


class BackendDown(BackendError, retryable=True, passing=True, counts_as_failure=False):
    """The backend went down, by its health probes, before the first byte of a response."""


class AnswerBrokeOff(BackendError):
    """The backend closed the connection in the middle of a response."""


class BackendBusy(
    BackendError,
    status=503,
    type="upstream_error",
    code="backend_busy",
    in_bursts=True,
    retryable=True,
    counts_as_failure=False,
):
    """The backend rejected the request with 429 or 503."""


class ModelMissing(
    BackendError, status=404, code="model_not_found", retryable=True, counts_as_failure=False, ran=False
):
    """The backend has stopped serving a model that it listed before."""


class BackendFault(BackendError, answered=True):
    """The backend returned another 5xx error, which is passed on to the client."""


class BackendAborted(BackendError, retryable=True, passing=True):
    """The backend aborted the response, as engines do when they shut down."""


class BackendRefusesKey(BackendError, not_retryable=True, code="backend_refuses_key"):
    """The backend rejected the gateway's API key."""


class EndpointNotOffered(
    BackendError, status=404, code="endpoint_not_offered", outcome="refused_by_backend", counts_as_failure=False
):
    """The backend does not support this endpoint for this model; an embedding model, for example, cannot chat."""


class EngineDead(BackendError, retryable=True, passing=True):
    """The backend's engine is dead: its API server responds but cannot serve requests."""


class BackendProtocolError(BackendError, code="bad_backend_answer"):
    """The backend's response is not valid HTTP."""


class WrongAnswer(BackendError, code="wrong_backend_answer"):
    """The backend's response to an embeddings batch, or to a piece of a list, does not match the request."""


class FirstByteTimeout(BackendError, status=504, code="backend_timeout"):
    """The backend sent no output within the timeout."""


class StreamInterrupted(BackendError, code="stream_interrupted", outcome="interrupted"):
    """The backend's response was interrupted after its first byte."""


class StreamStalled(StreamInterrupted, code="stream_stalled"):
    """The backend's response stalled: no output arrived within the timeout."""
