"""The errors of a request, each with its HTTP status and OpenAI's type and code.

Other exceptions are converted to these once, in `relay/`; these are rendered once, in `front/reply.py`.
"""

from typing import Any, ClassVar, Self

_REQUEST_IS_AT_FAULT = frozenset(range(400, 500)) - {408, 409, 429}


class GatewayError(Exception):
    """Base class of all request errors; only leaves are raised."""

    status: ClassVar[int]
    type: ClassVar[str]
    code: ClassVar[str | None] = None
    outcome: ClassVar[str] = "rejected"
    not_retryable: bool = False  # the same request would fail again
    jitters_retry_after: ClassVar[bool] = False  # clients get this error in bursts

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        not_retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        if not_retryable or self.status in _REQUEST_IS_AT_FAULT:
            self.not_retryable = True

    def retry_after(self, seconds: float | None) -> None:
        """Set when the client should retry, which the code that raised the error did not know."""
        self.retry_after_seconds = seconds


class InvalidRequest(GatewayError):
    """The request is invalid. Retrying it unchanged cannot succeed."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(GatewayError):
    """The API key is missing or invalid."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class HostNotAllowed(GatewayError):
    """The `Host` header of an admin request is not an allowed name."""

    status = 403
    type = "invalid_request_error"
    code = "host_not_allowed"


class RouteNotFound(GatewayError):
    """Unknown URL: no endpoint has this path."""

    status = 404
    type = "invalid_request_error"
    code = "unknown_url"


class MethodNotAllowed(GatewayError):
    """The endpoint does not support this HTTP method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class ModelNotFound(GatewayError):
    """No backend serves this model."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"

    @classmethod
    def of(cls, model: str) -> Self:
        """The error for a model that the client named."""
        return cls(f"The model {model!r} does not exist. GET /v1/models lists the available models.", param="model")


class RequestTimeout(GatewayError):
    """The client sent its request too slowly: a header, body or rate limit was exceeded."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(GatewayError):
    """The request body exceeds the size limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedEncoding(GatewayError):
    """Compressed request bodies are unsupported."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_content_encoding"


class HeadersTooLarge(GatewayError):
    """The request line or the headers exceed a limit."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class QueueFull(GatewayError):
    """All capacity is in use and the queue is full."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    outcome = "queue_full"
    jitters_retry_after = True


class WaitExpired(GatewayError):
    """No capacity became available within the queue timeout."""

    status = 429
    type = "rate_limit_error"
    code = "queue_timeout"
    outcome = "queue_timeout"
    jitters_retry_after = True


class RateLimited(GatewayError):
    """The API key exceeded its limit of requests or tokens per minute, or of concurrent requests."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    outcome = "rate_limited"


class DeadlineUnmeetable(GatewayError):
    """No capacity will be available before the client's deadline."""

    status = 429
    type = "rate_limit_error"
    code = "deadline_exceeded"
    outcome = "deadline_exceeded"
    not_retryable = True
    jitters_retry_after = True


class NoBackend(GatewayError):
    """No backend can serve this model at the moment."""

    status = 503
    type = "service_unavailable_error"
    code = "no_backend_available"
    outcome = "no_backend"
    jitters_retry_after = True


class MemoryFull(GatewayError):
    """The memory budget of the gateway for requests is exceeded."""

    status = 503
    type = "service_unavailable_error"
    code = "memory_budget_exceeded"
    outcome = "memory_full"
    jitters_retry_after = True


class OutOfDescriptors(GatewayError):
    """The gateway has no free file descriptor for a connection to a backend; not a failure of the backend."""

    status = 503
    type = "service_unavailable_error"
    code = "out_of_file_descriptors"
    outcome = "out_of_descriptors"
    jitters_retry_after = True


class Draining(GatewayError):
    """The gateway is shutting down."""

    status = 503
    type = "service_unavailable_error"
    code = "shutting_down"
    outcome = "draining"


class InternalError(GatewayError):
    """An internal error of the gateway (a bug)."""

    status = 500
    type = "internal_error"
    code = "internal_error"
    outcome = "internal_error"


class BackendError(GatewayError):
    """A backend failed. `retryable`: another backend may be tried if no data has reached the client."""

    status = 502
    type = "upstream_error"
    code = "backend_failed"
    outcome = "backend_error"
    retryable: ClassVar[bool] = False
    passing: ClassVar[bool] = False  # typical of a backend that starts or stops: it may recover
    counts_as_failure: ClassVar[bool] = True
    answered: bool = False  # the backend itself reported the failure: the request may be at fault
    answer: Any = None  # the backend's response, if any: passed on when no retry is left

    def __init__(
        self, message: str, *, retry_after_seconds: float | None = None, answered: bool = False, answer: Any = None
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        if answered:
            self.answered = True
        self.answer = answer


class ConnectFailed(BackendError):
    """Could not connect to the backend; nothing was sent."""

    code = "backend_unreachable"
    retryable = True
    passing = True


class ReusedConnectionClosed(BackendError):
    """The backend closed a pooled connection before the first byte of a response: the usual keep-alive race."""

    retryable = True
    counts_as_failure = False


class FreshConnectionClosed(BackendError):
    """The backend closed a new connection before the first byte of a response; the request may have crashed it."""

    retryable = True
    passing = True


class AnswerBrokeOff(BackendError):
    """The backend closed the connection in the middle of a response."""


class BackendBusy(BackendError):
    """The backend rejected the request with 429 or 503."""

    status = 503
    code = "backend_busy"
    jitters_retry_after = True
    retryable = True
    counts_as_failure = False


class ModelMissing(BackendError):
    """The backend no longer serves a model that it listed before."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    retryable = True
    counts_as_failure = False


class BackendFault(BackendError):
    """The backend returned another 5xx error, which is passed on to the client."""

    answered = True


class BackendAborted(BackendError):
    """The backend aborted the response, as engines do when they shut down."""

    retryable = True
    passing = True


class BackendRefusesKey(BackendError):
    """The backend rejected the gateway's API key."""

    not_retryable = True
    code = "backend_refuses_key"


class EndpointNotOffered(BackendError):
    """The backend does not support this endpoint for this model; an embedding model, for example, cannot chat."""

    status = 404
    type = "invalid_request_error"
    code = "endpoint_not_offered"
    outcome = "refused_by_backend"
    counts_as_failure = False


class EngineDead(BackendError):
    """The backend's engine is dead: its API server responds but cannot serve requests."""

    retryable = True
    passing = True


class BackendProtocolError(BackendError):
    """The backend's response is not valid HTTP."""

    code = "bad_backend_answer"


class WrongAnswer(BackendError):
    """The backend's response to an embeddings batch, or to a piece of a list, does not match the request."""

    code = "wrong_backend_answer"


class FirstByteTimeout(BackendError):
    """The backend sent no data within the timeout."""

    status = 504
    code = "backend_timeout"


class StreamInterrupted(BackendError):
    """The backend's response was interrupted after its first byte."""

    code = "stream_interrupted"
    outcome = "interrupted"


class StreamStalled(StreamInterrupted):
    """The backend's response stalled: no data arrived within the timeout."""

    code = "stream_stalled"
