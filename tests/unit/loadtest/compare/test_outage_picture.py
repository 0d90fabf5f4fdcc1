"""The picture has a panel for each proxy and fault."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from loadtest.compare.outage.report import picture
from loadtest.compare.outage.schema import Fault
from loadtest.drive.record import CONNECTION
from tests.unit.loadtest.compare.outage_turns import killed, record

RECORDS = [record(float(at), at + 0.5) for at in range(30)] + [record(12.0, 13.0, None, CONNECTION)]


def test_there_is_a_panel_for_each_proxy_and_fault_with_the_moments_marked() -> None:
    found = killed({("ours", Fault.KILL): RECORDS, ("ours", Fault.HANG): RECORDS, ("<theirs>", Fault.KILL): RECORDS})
    drawn = picture(found, ["ours", "<theirs>", "absent"])
    titles = [node.text for node in ET.fromstring(drawn).iter() if node.get("class") == "title"]
    panels = ["ours, engine killed:", "<theirs>, engine killed:", "ours, engine hanging:"]
    assert [(title or "").rpartition(" requests")[0] for title in titles] == panels


def test_of_nothing_there_is_no_picture() -> None:
    assert picture(killed({}), ["ours"]) == ""
