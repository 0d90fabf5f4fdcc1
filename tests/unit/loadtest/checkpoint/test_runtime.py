"""What Linux reports of a machine."""

from pathlib import Path

import pytest

from loadtest.checkpoint.machine import runtime

_CPU = """processor : 0
model name : Fast CPU
physical id : 0
core id : 0
flags : sse2 avx512f amx_tile

processor : 1
model name : Fast CPU
physical id : 0
core id : 0
flags : sse2 avx512f amx_tile
"""


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def test_a_container_of_the_unified_hierarchy_reports_its_limits(tmp_path: Path) -> None:
    found = runtime(
        written(
            tmp_path,
            {
                "proc/cpuinfo": _CPU,
                "proc/1/cgroup": "0::/kubepods/pod1\n",
                "proc/self/cgroup": "0::/kubepods/pod1\n",
                "etc/os-release": 'NAME=x\nPRETTY_NAME="Some Linux 12"\n',
                "sys/fs/cgroup/cpu.max": "max 100000\n",
                "sys/fs/cgroup/kubepods/pod1/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/memory.max": "1073741824\n",
                "sys/devices/system/node/node0/cpulist": "0-1\n",
                "sys/devices/system/node/node1/cpulist": "2-3\n",
            },
        )
    )
    assert found.os == "Some Linux 12"
    assert found.container == "the first process is in a group of kubepods"
    assert found.cgroup == {"cpu.max": "400000 100000", "memory.max": "1073741824"}
    assert (found.cpu_model, found.cpu_cores, found.cpu_flags) == ("Fast CPU", 1, "amx_tile avx512f sse2")
    assert found.numa_nodes == {"node0": "0-1", "node1": "2-3"}


def test_the_old_hierarchy_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "1024\n",
    }
    found = runtime(written(tmp_path, files | {".dockerenv": ""}))
    assert found.cgroup == {"cpu.cfs_quota_us": "50000", "memory.limit_in_bytes": "1024"}
    assert found.container == "/.dockerenv is there"


def test_a_system_that_reports_nothing_is_not_guessed(tmp_path: Path) -> None:
    found = runtime(tmp_path)
    assert (found.cgroup, found.container, found.cpu_cores, found.cpu_flags, found.numa_nodes) == (
        {},
        None,
        None,
        "",
        {},
    )


def test_this_machine_reports_something() -> None:
    found = runtime()
    assert found.memory_bytes > 0
    assert 0 < found.cpus_usable <= found.cpus
    assert found.ulimits["open files"].count("/") == 1
