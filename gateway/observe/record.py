"""What is remembered of one request, for metrics, the access log and learning. No prompts, no keys."""

from gateway.request import Ask, Usage


class Record:
    """One request's story. Times are the loop's clock, in seconds; None = did not happen.

    Defaults stand in the class, so that making one costs only what is set.
    """

    model: str = ""
    client: str = ""
    backend: str = ""
    outcome: str = ""
    status: int = 0
    attempts: int = 0
    streams: bool = False
    batch: bool = False
    queue_seconds: float = 0.0
    first_byte_seconds: float | None = None
    ended_seconds: float = 0.0
    predicted_hit_tokens: int = 0
    actual_hit_tokens: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_inputs: int | None = None  # of embeddings: not computed for this request; None = none could be
    streamed_tokens: int = 0  # at least so many came, also of an answer that was cut short
    error: str = ""
    ask: Ask | None = None
    seat_index: int = 0
    usage: Usage | None = None
    held_up: bool = False  # the client took its answer more slowly than it came

    def __init__(self, request_id: str, endpoint: str, arrived_seconds: float, request_bytes: int = 0) -> None:
        self.request_id = request_id
        self.endpoint = endpoint
        self.arrived_seconds = arrived_seconds
        self.request_bytes = request_bytes
