"""Several gateways in front of one fleet: replicas share the engines through Redis or Valkey."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gateway.backends.fleet import Fleet
from gateway.config import Config
from gateway.config.coordination import CoordinationConfig
from gateway.routing.announced_record import AnnouncedIndex
from gateway.routing.cache_view import PrefixIndex

if TYPE_CHECKING:
    from gateway.coordination.coordinator import Coordinator
    from gateway.coordination.sharing import CacheSharing


def configured_coordinators(config: CoordinationConfig, *parts: Any) -> "tuple[Coordinator, ...]":
    """This gateway among others, if it is not alone; the modules for that are imported only then."""
    if not config.url:
        return ()
    from gateway.coordination.coordinator import new_coordinator

    return (new_coordinator(config, *parts),)


def configured_sharing(
    config: Config, fleet: Fleet, index: PrefixIndex, *parts: Any, follow_secret: Callable[[bytes], None]
) -> "tuple[CacheSharing, ...]":
    """What it exchanges with the others of caches, if it is not alone: then its index announces what changes."""
    if not isinstance(index, AnnouncedIndex):
        return ()
    from gateway.coordination.sharing import CacheSharing

    follow = None if config.auth.cache_salt_secret else follow_secret
    return (CacheSharing(config.coordination, fleet, index, *parts, follow_secret=follow),)
