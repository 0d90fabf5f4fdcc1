"""Which source makes the prompts of which workload."""

from __future__ import annotations

from loadtest.workloads.prompts import PromptSource, Source
from loadtest.workloads.recorded import TraceSource
from loadtest.workloads.spec import WorkloadKind, WorkloadSpec


def source_of(spec: WorkloadSpec) -> Source:
    """The source of a workload's prompts. Reads the file that the workload names, if it names one."""
    if spec.kind is WorkloadKind.TRACE:
        return TraceSource(spec)
    return PromptSource(spec)
