import pytest

from gateway.insights.advice import advice_on
from gateway.insights.kinds import Kind


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_an_advice(kind: Kind) -> None:
    told = advice_on(kind, "tools, byte 12", 1234)
    assert "it is in tools, byte 12" in told or "It is in tools, byte 12" in told
    assert "1,234 tokens" in told
    assert told.endswith(".")
