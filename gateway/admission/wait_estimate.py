"""How long the wait will be, and who need not begin it."""

from collections.abc import Callable

from gateway.admission.queue import Queue
from gateway.admission.service_rate import ServiceRates
from gateway.admission.ticket import Ticket
from gateway.errors import DeadlineUnmeetable
from gateway.request import Ask

_ENOUGH_SERVED = 16  # of those who have waited since the line began: fewer tell nothing of how fast it moves
_DOUBT = 2.0  # nobody is sent away for a wait that is less than so much too long


class WaitEstimator:
    """Looks at the line and at how fast it moves."""

    def __init__(self, queue: Queue, rates: ServiceRates) -> None:
        self._queue = queue
        self._rates = rates

    def wait_seconds(self, ask: Ask, now: float) -> float | None:
        """The expected wait of a request that joins now; None = it cannot be told yet.

        Places come free at the rate at which requests leave; while few have waited, that is the rate at which they
        came. So those must have moved on who waited in this line, and the better of both rates counts.
        """
        line = self._queue.line(ask.model)
        if line is None or line.served < _ENOUGH_SERVED:
            return None
        places = line.ahead(ask) + 1
        by_line = places * (now - line.began_seconds) / line.served
        return min(by_line, self._rates.seconds_for(ask.model, places, now))

    def service_rate(self, model: str, now: float) -> float | None:
        """Requests a second that give their place back; None = not known yet."""
        return self._rates.per_second(model, now)

    def refuse_late(self, ticket: Ticket, now: float, retry_after: Callable[[], float]) -> None:
        """Raises DeadlineUnmeetable if the deadline cannot be met: a wait must be twice as long as what is left."""
        left = ticket.late_seconds - now
        wait = self.wait_seconds(ticket.ask, now) or 0.0
        if left < 0 or wait > _DOUBT * left:
            raise DeadlineUnmeetable(
                f"All backends for model {ticket.ask.model!r} are busy, and none will have free capacity in time for"
                " this request's deadline.",
                retry_after_seconds=retry_after(),
            )
