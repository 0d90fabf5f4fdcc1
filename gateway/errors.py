"""Everything that can go wrong with a request, each with its HTTP status and OpenAI's words for it.

Foreign exceptions become one of these once, in `relay/`; these become bytes once, in `front/reply.py`.
"""

from typing import Any, ClassVar

_FOR_GOOD = frozenset(range(400, 500)) - {408, 409, 429}  # what such a status tells is the request's fault


class GatewayError(Exception):
    """A request that is answered with an error. Abstract: raise a leaf."""

    status: ClassVar[int]
    type: ClassVar[str]
    code: ClassVar[str | None] = None
    outcome: ClassVar[str] = "rejected"
    hopeless: bool = False  # sending the same again cannot help
    spreads: ClassVar[bool] = False  # many are told this at the same time, and should not come back together

    def __init__(self, message: str, *, param: str | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        if self.status in _FOR_GOOD:
            self.hopeless = True


class InvalidRequest(GatewayError):
    """The request is wrong; sending it again cannot help."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(GatewayError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class HostNotAllowed(GatewayError):
    """The admin port was asked under a name that is not its own."""

    status = 403
    type = "invalid_request_error"
    code = "host_not_allowed"


class RouteNotFound(GatewayError):
    """No such method and path here."""

    status = 404
    type = "invalid_request_error"
    code = "unknown_url"


class MethodNotAllowed(GatewayError):
    """The path exists, with another method."""

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


class RequestTimeout(GatewayError):
    """The client was too slow in sending its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(GatewayError):
    """The body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedEncoding(GatewayError):
    """The body is compressed."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_content_encoding"


class HeadersTooLarge(GatewayError):
    """The head of the request is over the limit."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class QueueFull(GatewayError):
    """Capacity exists but is taken, and no more may wait."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    outcome = "queue_full"
    spreads = True


class WaitExpired(GatewayError):
    """Capacity exists but did not come free in time."""

    status = 429
    type = "rate_limit_error"
    code = "queue_timeout"
    outcome = "queue_timeout"
    spreads = True


class RateLimited(GatewayError):
    """The API key has used up its requests or tokens a minute, or has too many requests at once."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    outcome = "rate_limited"


class DeadlineUnmeetable(GatewayError):
    """Capacity exists but does not come free before the client wants no answer any more."""

    status = 429
    type = "rate_limit_error"
    code = "deadline_exceeded"
    outcome = "deadline_exceeded"
    hopeless = True
    spreads = True


class NoBackend(GatewayError):
    """No backend can serve this model now."""

    status = 503
    type = "service_unavailable_error"
    code = "no_backend_available"
    outcome = "no_backend"
    spreads = True


class MemoryFull(GatewayError):
    """The requests that the gateway holds have used up its memory budget."""

    status = 503
    type = "service_unavailable_error"
    code = "memory_budget_exceeded"
    outcome = "memory_full"
    spreads = True


class OutOfDescriptors(GatewayError):
    """The gateway has no file descriptor left for a connection to a backend. This is no failure of the backend."""

    status = 503
    type = "service_unavailable_error"
    code = "out_of_file_descriptors"
    outcome = "out_of_descriptors"
    spreads = True


class Draining(GatewayError):
    """The gateway is shutting down."""

    status = 503
    type = "service_unavailable_error"
    code = "shutting_down"
    outcome = "draining"


class InternalError(GatewayError):
    """A fault of the gateway itself."""

    status = 500
    type = "internal_error"
    code = "internal_error"
    outcome = "internal_error"


class BackendError(GatewayError):
    """A backend failed. `retryable`: another backend may be tried, provided that nothing reached the client."""

    status = 502
    type = "upstream_error"
    code = "backend_failed"
    outcome = "backend_error"
    retryable: ClassVar[bool] = False
    passing: ClassVar[bool] = False  # backends that stop or start fail like this: the same one may do better later
    counts_as_failure: ClassVar[bool] = True
    answered: bool = False  # the backend is well enough to say that it failed: the request may be at fault
    answer: Any = None  # what the backend said, if it said anything: passed on when nothing else can be tried


class ConnectFailed(BackendError):
    """No connection came about: nothing was sent."""

    code = "backend_unreachable"
    retryable = True
    passing = True


class ReusedConnectionClosed(BackendError):
    """A pooled connection ended before the first byte of an answer: the usual keep-alive race."""

    retryable = True
    counts_as_failure = False


class FreshConnectionClosed(BackendError):
    """A new connection ended before the first byte of an answer: the backend may have died of this request."""

    retryable = True
    passing = True


class AnswerBrokeOff(BackendError):
    """The connection ended in the middle of an answer."""


class BackendBusy(BackendError):
    """The backend answered 429 or 503 before anything else."""

    status = 503
    code = "backend_busy"
    spreads = True
    retryable = True
    counts_as_failure = False


class ModelMissing(BackendError):
    """The backend does not know a model that it listed before."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    retryable = True
    counts_as_failure = False


class BackendFault(BackendError):
    """The backend answered 5xx before anything else: it is counted against it, and passed on."""

    answered = True


class BackendAborted(BackendError):
    """The backend gave the answer up, as engines do that are told to stop."""

    retryable = True
    passing = True


class BackendRefusesKey(BackendError):
    """The backend does not accept the key that the gateway has for it."""

    hopeless = True
    code = "backend_refuses_key"


class EndpointNotOffered(BackendError):
    """The backend of this model does not have this endpoint: an embedding model cannot chat."""

    status = 404
    type = "invalid_request_error"
    code = "endpoint_not_offered"
    outcome = "refused_by_backend"
    counts_as_failure = False


class EngineDead(BackendError):
    """The backend's engine is dead: its API answers, but can serve nothing."""

    retryable = True
    passing = True


class BackendProtocolError(BackendError):
    """The backend's answer is not valid HTTP."""

    code = "bad_backend_answer"


class WrongAnswer(BackendError):
    """The backend's answer to a batch of embeddings, or a piece of a list, does not match what it was asked."""

    code = "wrong_backend_answer"


class FirstByteTimeout(BackendError):
    """The backend sent nothing in the time allowed."""

    status = 504
    code = "backend_timeout"


class StreamInterrupted(BackendError):
    """The backend's answer broke off after its first byte."""

    code = "stream_interrupted"
    outcome = "interrupted"


class StreamStalled(StreamInterrupted):
    """The backend's answer stopped coming."""

    code = "stream_stalled"
