"""The load under which engines go, and when it can be asked for."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from loadtest.compare.options import CompareOptions
from loadtest.compare.outage.schema import Fault
from loadtest.servers.engines import Kind
from loadtest.workloads.prompts import Endpoint


@pytest.mark.parametrize("given", [{"engines": 1}, {"backends": "http://a:1,http://b:1"}])
def test_an_engine_goes_only_where_one_is_left_and_ours_to_take(given: dict[str, Any]) -> None:
    assert CompareOptions(**given).killed == "no"
    for killed in ("also", "only"):
        with pytest.raises(ValidationError, match="two at least"):
            CompareOptions(killed=killed, **given)


@pytest.mark.parametrize("kind", Kind)
def test_clients_give_up_before_the_engine_is_back(kind: Kind) -> None:
    load = CompareOptions(engine=kind).killed_load
    outage = load.outage(1, Fault.HANG)
    assert (outage.engine, outage.fault) == (1, Fault.HANG)
    assert 0 < outage.gone < outage.let_back < load.seconds
    assert load.patience_seconds < outage.let_back - outage.gone
    assert outage.long_wait < load.patience_seconds
    assert CompareOptions(engine=kind, killed_seconds=90.0).killed_load.seconds == 90.0


def test_half_of_what_is_sent_are_streams() -> None:
    load = CompareOptions().killed_load
    plan = load.plan("http://a", Endpoint.CHAT, "m", 3)
    assert [(part.stream, part.share) for part in plan.mix] == [(True, 1.0), (False, 1.0)]
    assert (plan.rate_per_second, plan.duration_seconds) == (load.rate_per_second, load.seconds)
    assert plan.timeout_seconds == load.patience_seconds
