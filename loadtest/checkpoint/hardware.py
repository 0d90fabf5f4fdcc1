"""The machine's GPUs: what nvidia-smi tells of their model, mode and clocks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from xml.etree import ElementTree

from loadtest.checkpoint.document import Gpu, Hardware

_TIMEOUT_SECONDS = 20.0


class Untold(Exception):
    """A program that does not tell what it is asked; the message says why."""


def hardware(ask: Callable[[Sequence[str]], str] | None = None) -> Hardware:
    """As `nvidia-smi -q -x` and `nvidia-smi topo -m` tell; says plainly where there is no GPU."""
    ask = ask or _asked
    try:
        document = ElementTree.fromstring(ask(("-q", "-x")))
    except Untold as why:
        return Hardware(no_gpu=f"no GPU: {why}")
    except ElementTree.ParseError as error:
        return Hardware(no_gpu=f"no GPU: nvidia-smi -q -x tells no XML: {error}")
    gpus = [_gpu(element) for element in document.iter("gpu")]
    if not gpus:
        return Hardware(no_gpu="no GPU: nvidia-smi lists none")
    try:
        topology = ask(("topo", "-m"))
    except Untold as why:
        topology = str(why)
    return Hardware(
        no_gpu=None,
        driver=document.findtext("driver_version", ""),
        cuda=document.findtext("cuda_version", ""),
        gpus=gpus,
        topology=topology.strip(),
    )


def _gpu(element: ElementTree.Element) -> Gpu:
    def told(*paths: str) -> str:
        return next((text for path in paths if (text := element.findtext(path, "").strip()) not in ("", "N/A")), "N/A")

    link = "pci/pci_gpu_link_info"
    return Gpu(
        name=told("product_name"),
        uuid=told("uuid"),
        memory=told("fb_memory_usage/total"),
        mig=told("mig_mode/current_mig"),
        ecc=told("ecc_mode/current_ecc"),
        persistence=told("persistence_mode"),
        power_limit=told("gpu_power_readings/current_power_limit", "power_readings/power_limit"),
        clocks={
            "sm": told("clocks/sm_clock"),
            "memory": told("clocks/mem_clock"),
            "sm max": told("max_clocks/sm_clock"),
            "memory max": told("max_clocks/mem_clock"),
            "sm set": told("applications_clocks/graphics_clock"),
        },
        pcie=f"gen {told(f'{link}/pcie_gen/current_link_gen')} x {told(f'{link}/link_widths/current_link_width')}",
    )


def _asked(arguments: Sequence[str]) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise Untold("nvidia-smi is not installed here")
    try:
        ended = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Untold(f"nvidia-smi does not answer: {error}") from None
    if ended.returncode:
        raise Untold(f"nvidia-smi says {(ended.stdout + ended.stderr).strip().splitlines()[:1] or 'nothing'}")
    return ended.stdout
