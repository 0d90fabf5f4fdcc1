"""The locks of the image satisfy pyproject.toml, are complete, and have hashes."""

from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.image.lock import EXTRAS, LOCKS, entries, wanted

MAX_PACKAGES = 35
NAMES = ("base", *EXTRAS, "build")


def pins_of(name: str) -> dict[str, Requirement]:
    """What a lock installs here, by package."""
    lock = entries((LOCKS / f"{name}.lock").read_text())
    pins = [Requirement(pin.partition("\\\n")[0].strip()) for each in lock.values() for pin in each]
    return {canonicalize_name(pin.name): pin for pin in pins if pin.marker is None or pin.marker.evaluate()}


@pytest.mark.parametrize("name", NAMES)
def test_it_satisfies_what_is_required(name: str) -> None:
    pins = pins_of("base") | pins_of(name)
    for requirement in map(Requirement, wanted()[name]):
        (version,) = pins[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(version.version), f"{requirement}: run `make lock`"


@pytest.mark.parametrize("name", NAMES)
def test_every_version_is_pinned_with_hashes(name: str) -> None:
    for pins in entries((LOCKS / f"{name}.lock").read_text()).values():
        for pin in pins:
            first, *hashes = pin.splitlines()
            assert "==" in first
            assert hashes
            assert all(line.strip().startswith("--hash=sha256:") for line in hashes)


@pytest.mark.parametrize("name", ["base", *EXTRAS])
def test_nothing_that_a_package_needs_is_missing(name: str) -> None:
    pins = pins_of("base") | pins_of(name)
    for package in pins:
        try:
            needs = [Requirement(need) for need in requires(package) or ()]
        except PackageNotFoundError:  # of another version of Python, or newer than what is installed here
            continue
        missing = [
            need.name
            for need in needs
            if (need.marker is None or need.marker.evaluate({"extra": ""})) and canonicalize_name(need.name) not in pins
        ]
        assert missing == [], package


def test_the_base_stays_small() -> None:
    assert len(pins_of("base")) < MAX_PACKAGES
