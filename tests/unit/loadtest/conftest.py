"""Tests that are marked `virtual_time` run on a network in memory, in a time that passes while all tasks wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.unit.loadtest.virtual_network import VirtualNetwork


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    is_virtual = item.get_closest_marker("virtual_time") is not None
    return {"loop": VirtualNetwork if is_virtual else asyncio.new_event_loop}
