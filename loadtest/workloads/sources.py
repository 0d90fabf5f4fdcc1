"""Which source makes the prompts of which workload."""

from __future__ import annotations

from loadtest.workloads.prompts import PromptSource, Source
from loadtest.workloads.recorded import TraceSource
from loadtest.workloads.sessions import SessionSource
from loadtest.workloads.sharegpt import DatasetSource, ShareGptSource
from loadtest.workloads.spec import WorkloadKind, WorkloadSpec
from loadtest.workloads.texts import TextsSource


def source_of(spec: WorkloadSpec) -> Source:
    """The source of a workload's prompts. Reads the file that the workload names, if it names one."""
    match spec.kind:
        case WorkloadKind.TRACE:
            return TraceSource(spec)
        case WorkloadKind.SESSIONS:
            return SessionSource(spec) if spec.file is None else DatasetSource(spec, whole=True)
        case WorkloadKind.SHAREGPT:
            return ShareGptSource(spec) if spec.file is None else DatasetSource(spec, whole=False)
        case WorkloadKind.TEXTS:
            return TextsSource(spec)
        case _:
            return PromptSource(spec)
