"""How a worker's settings differ from those of the file, and how often a worker is started again."""

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config
from gateway.config.file import parse
from gateway.features.workers.parent import pause_seconds, private_folder
from gateway.features.workers.place import WorkerPlace, keeps_batches

pytest.importorskip("hiredis")


def config_of(**sections: Any) -> Config:
    return parse({"backends": [{"url": "http://a"}], "server": {"workers": 3}, **sections})


def place(number: int) -> WorkerPlace:
    return WorkerPlace(number, 3, "/run/x", 5, (6, 7), keeps_batches=True)


def test_a_place_comes_through_the_environment_once() -> None:
    environment = {"PATH": "/bin", **place(1).given()}
    assert WorkerPlace.taken(environment) == place(1)
    assert environment == {"PATH": "/bin"}
    assert WorkerPlace.taken(environment) is None


def test_workers_meet_in_the_store_of_their_parent_unless_they_meet_in_redis() -> None:
    alone = config_of(coordination={"name": "fleet", "password": "p"})
    found = place(1).applied(alone).coordination
    assert (found.url, found.name, found.expected_replicas, found.password) == ("unix:///run/x/store", "fleet", 3, "")
    several = config_of(coordination={"url": "redis://r"})
    assert place(1).applied(several).coordination == several.coordination


def test_what_a_worker_keeps_on_disk_is_its_own() -> None:
    config = config_of(state={"path": "/state"}, batches={"path": "/batches"})
    first, second = place(0).applied(config), place(1).applied(config)
    assert (first.state.path, second.state.path) == ("/state", "/state/worker-1")
    assert (first.batches.path, second.batches.path) == ("/batches", None)
    assert keeps_batches(config)
    assert (place(0).batches_elsewhere, place(1).batches_elsewhere) == ("", "/run/x/batches-0")


def test_a_worker_that_ends_again_and_again_is_started_later_each_time() -> None:
    assert [pause_seconds(failures) for failures in range(6)] == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0]
    assert pause_seconds(50) == 30.0


def test_the_sockets_of_workers_are_in_a_folder_that_no_other_user_can_enter() -> None:
    with private_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        Path(folder, "store").touch()
    assert not Path(folder).exists()


def test_where_no_folder_for_temporary_files_can_be_written_they_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_found)
    with private_folder() as folder:
        assert Path(folder).parent == Path("/dev/shm")
