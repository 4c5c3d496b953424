from __future__ import annotations

import os

import pytest

from distlaunch.core.agent.workers.shared_memory import SharedMemoryFiles, shared_memory_names
from distlaunch.core.protocol import agent_messages as m


def removed(folder, *names: str, owner: int | None = None) -> None:
    files = SharedMemoryFiles(owner=os.getuid() if owner is None else owner, folder=str(folder))
    files.set_names(names)
    files.remove()


def names(
    *ranks: int, env: dict[str, str] | None = None, shared_memory: tuple[str, ...]
) -> tuple[str, ...]:
    workers = tuple(
        m.WorkerSpec(rank=rank, local_rank=0, argv=None, env={}, cpus=None, error_file=None)
        for rank in ranks
    )
    start = m.Start(
        attempt=0,
        argv=("a",),
        env=env or {},
        cwd="/",
        workers=workers,
        uses_gpus=False,
        signal_group=False,
        terminal=False,
        rows=0,
        columns=0,
        stdin_rank=None,
        shared_memory=shared_memory,
    )
    return shared_memory_names(start, owner=1000)


def test_file_names_are_those_of_this_nodes_workers():
    env = {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "29500"}
    two = ("a_{uid}_{address}_{port}_{rank}", "b_{address}_{port}")
    found = names(2, 3, env=env, shared_memory=two)
    assert found == ("a_1000_fe80::1_29500_2", "b_fe80::1_29500", "a_1000_fe80::1_29500_3")
    assert names(2, env=env, shared_memory=()) == ()


def test_only_expected_files_are_removed(tmp_path):
    for name in ("mine_1", "mine_10", "mine_2"):
        (tmp_path / name).write_text("x")
    removed(tmp_path, "mine_1", "mine_2", "never made", "x" * 1000, "mine_*", "")
    assert [each.name for each in tmp_path.iterdir()] == ["mine_10"]


def test_files_are_removed_only_once(tmp_path):
    files = SharedMemoryFiles(owner=os.getuid(), folder=str(tmp_path))
    files.set_names(("name",))
    files.remove()
    (tmp_path / "name").write_text("of somebody else, later")
    files.remove()
    files.set_names(("name",))
    files.set_names(())
    files.remove()
    assert (tmp_path / "name").exists()


def link(path, target) -> None:
    path.symlink_to(target)


def folder(path, target) -> None:
    path.mkdir()


def pipe(path, target) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [link, folder, pipe])
def test_only_regular_files_are_removed(tmp_path, make):
    inside, target = tmp_path / "shm", tmp_path / "target"
    inside.mkdir()
    target.write_text("x")
    make(inside / "name", target)
    removed(inside, "name")
    assert [each.name for each in inside.iterdir()] == ["name"]
    assert target.read_text() == "x"


def test_another_users_file_stays(tmp_path):
    (tmp_path / "name").write_text("x")
    removed(tmp_path, "name", owner=os.getuid() + 1)
    assert (tmp_path / "name").exists()


@pytest.mark.parametrize(
    "name", ["../target", "shm/../../target", "{}/target", "inner/file", "./file", "."]
)
def test_a_name_with_a_path_is_ignored(tmp_path, name):
    inside = tmp_path / "shm"
    (inside / "inner").mkdir(parents=True)
    files = [tmp_path / "target", inside / "inner" / "file", inside / "file"]
    for file in files:
        file.write_text("x")
    removed(inside, name.format(tmp_path))
    assert all(file.exists() for file in files)
