"""Several gateways in front of one fleet: replicas share the engines through Redis or Valkey."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from gateway.backends.fleet import Fleet
from gateway.config import Config
from gateway.front.stored_responses import StoredResponses
from gateway.routing.announced_record import AnnouncedIndex
from gateway.routing.cache_view import PrefixIndex
from gateway.routing.estimates import OutputLengths
from gateway.scheduling.leases import LeaseBroker
from gateway.scheduling.wait_queue import Queue
from gateway.supervisor import Supervisor

if TYPE_CHECKING:
    from gateway.coordination.coordinator import Coordinator


@dataclass(frozen=True, slots=True)
class ReplicaParts:
    """What a gateway's coordinator reads and sets. `new_name` never gives the same name twice; `is_followed`: whether
    KV events say what an engine's cache holds; `secret`: of cache salts; `counted`: the number of replicas changed."""

    stored: StoredResponses
    _: KW_ONLY
    fleet: Fleet
    queue: Queue
    lengths: OutputLengths
    kv_headroom: Callable[[], float]
    broker: LeaseBroker
    index: PrefixIndex
    is_followed: Callable[[int], bool]
    secret: bytes
    follow_secret: Callable[[bytes], None]
    counted: Callable[[], None]
    new_name: Callable[[], str]
    clock: Callable[[], float]
    supervisor: Supervisor


def configured_coordinators(config: Config, parts: ReplicaParts) -> "tuple[Coordinator, ...]":
    """This gateway among others, if it is not alone; the modules for that are imported only then.

    Then its index announces what changes.
    """
    if not isinstance(parts.index, AnnouncedIndex):
        return ()
    from gateway.coordination.coordinator import Coordinator
    from gateway.coordination.demand import Demands
    from gateway.coordination.link import RedisLink
    from gateway.coordination.replica import ReplicaBlocks
    from gateway.coordination.responses import ResponseExchange
    from gateway.coordination.sharing import CacheSharing

    fleet, broker, clock, supervisor = parts.fleet, parts.broker, parts.clock, parts.supervisor
    link = RedisLink(config.coordination, parts.new_name(), supervisor)
    blocks = ReplicaBlocks(link.replica, config.coordination.expected_replicas, parts.new_name)
    follow = None if config.auth.cache_salt_secret else parts.follow_secret
    responses = ResponseExchange(parts.stored)
    sharing = CacheSharing(
        link,
        fleet=fleet,
        index=parts.index,
        is_followed=parts.is_followed,
        responses=responses,
        clock=clock,
        supervisor=supervisor,
        secret=parts.secret,
        follow_secret=follow,
    )
    demands = Demands(fleet, parts.queue, parts.lengths, kv_headroom=parts.kv_headroom)
    return (
        Coordinator(
            link,
            blocks=blocks,
            sharing=sharing,
            fleet=fleet,
            demands=demands,
            broker=broker,
            counted=parts.counted,
            clock=clock,
            supervisor=supervisor,
        ),
    )
