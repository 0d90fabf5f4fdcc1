"""Several gateways in front of one fleet: replicas share the engines through Redis or Valkey."""

from typing import TYPE_CHECKING, Any

from gateway.config.coordination import CoordinationConfig

if TYPE_CHECKING:
    from gateway.coordination.coordinator import Coordinator


def configured_coordinators(config: CoordinationConfig, *parts: Any) -> "tuple[Coordinator, ...]":
    """This gateway among others, if it is not alone; the modules for that are imported only then."""
    if not config.url:
        return ()
    from gateway.coordination.coordinator import new_coordinator

    return (new_coordinator(config, *parts),)
