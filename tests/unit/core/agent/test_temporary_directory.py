from __future__ import annotations

import os

import pytest

from distlaunch.core.agent.workers.temporary_directory import (
    TemporaryDirectory,
    adapt_start,
    has_run_dir,
    remove_tree,
)
from distlaunch.core.model.run_files import MARKER
from distlaunch.core.protocol import agent_messages as m

RUN_DIR = "/runs/job-1"


def start(**fields) -> m.Start:
    path = f"{RUN_DIR}/attempt-0/rank-0.error.json"
    workers = (
        m.WorkerSpec(
            rank=0,
            local_rank=0,
            argv=None,
            env={"TORCHELASTIC_ERROR_FILE": path, "RANK": "0", "OWN": path},
            cpus=None,
            error_file=path,
        ),
    )
    values = {
        "attempt": 0,
        "argv": ("a",),
        "env": {"DISTLAUNCH_RUN_DIR": RUN_DIR, "A": "sent"},
        "cwd": "/work",
        "workers": workers,
        "uses_gpus": False,
        "signal_group": False,
        "terminal": False,
        "rows": 0,
        "columns": 0,
        "stdin_rank": None,
        "preload_log": f"{RUN_DIR}/attempt-0/preload.log",
    }
    return m.Start(**{**values, **fields})


def test_the_nodes_environment_is_used_without_variables_of_outer_launchers():
    own = {
        "A": "own",
        "B": "own",
        "SSH_CONNECTION": "x",
        "SSH_AUTH_SOCK": "x",
        "RANK": "3",
        "PET_NNODES": "1",
        "_": "/bin/sh",
        "SHLVL": "1",
        "OLDPWD": "/",
        "PWD": "/home",
        "DISTLAUNCH_GRACE": "1",
        "XDG_RUNTIME_DIR": "/run/user/1",
    }
    there = adapt_start(start(), own, moved_to=None)
    assert there.env == {
        "A": "sent",
        "B": "own",
        "PWD": "/work",
        "DISTLAUNCH_RUN_DIR": RUN_DIR,
        "XDG_RUNTIME_DIR": "/run/user/1",
    }
    assert (there.workers, there.preload_log) == (start().workers, start().preload_log)


def test_files_of_a_missing_run_directory_are_moved():
    there = adapt_start(start(), {}, moved_to="/tmp/mine")
    [worker] = there.workers
    moved = "/tmp/mine/attempt-0/rank-0.error.json"
    assert worker.error_file == moved
    assert worker.env == {
        "TORCHELASTIC_ERROR_FILE": moved,
        "RANK": "0",
        "OWN": f"{RUN_DIR}/attempt-0/rank-0.error.json",
    }
    assert there.env["DISTLAUNCH_RUN_DIR"] == "/tmp/mine"
    assert there.preload_log == "/tmp/mine/attempt-0/preload.log"


def test_torchs_flight_recorder_uses_its_default_without_a_run_directory():
    inside, outside = f"{RUN_DIR}/attempt-0/trace_", "/scratch/trace_"
    env = {
        "DISTLAUNCH_RUN_DIR": RUN_DIR,
        "TORCH_FR_DUMP_TEMP_FILE": inside,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": outside,
        "MINE": inside,
    }
    there = adapt_start(start(env=env), {}, moved_to="/tmp/mine")
    assert "TORCH_FR_DUMP_TEMP_FILE" not in there.env
    assert (there.env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"], there.env["MINE"]) == (outside, inside)
    assert adapt_start(start(env=env), {}, moved_to=None).env["TORCH_FR_DUMP_TEMP_FILE"] == inside


@pytest.mark.parametrize("path", ["/runs/job-10/rank-0.error.json", "/elsewhere/x", ""])
def test_paths_outside_the_run_directory_are_kept(path):
    spec = m.WorkerSpec(rank=0, local_rank=0, argv=None, env={}, cpus=None, error_file=path)
    there = adapt_start(start(workers=(spec,)), {}, moved_to="/tmp/mine")
    assert there.workers[0].error_file == path


def test_the_directory_is_private_created_on_use_and_removed(tmp_path):
    temporary_dir = TemporaryDirectory({"TMPDIR": str(tmp_path)})
    assert temporary_dir.path == ""
    assert list(tmp_path.iterdir()) == []
    folder = temporary_dir.run_dir()
    assert os.stat(temporary_dir.path).st_mode & 0o777 == 0o700
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    os.symlink(outside, f"{folder}/link")
    os.makedirs(f"{folder}/deep/er")
    os.chmod(f"{folder}/deep", 0)
    temporary_dir.remove()
    assert (outside / "file").exists()
    assert list(tmp_path.iterdir()) == [outside]
    temporary_dir.remove()


def test_the_directory_is_created_again_if_it_was_removed(tmp_path):
    temporary_dir = TemporaryDirectory({"TMPDIR": str(tmp_path)})
    first = temporary_dir.run_dir()
    remove_tree(temporary_dir.path)
    second = temporary_dir.run_dir()
    assert first != second
    assert os.path.isdir(second)
    temporary_dir.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("base", ["relative", "/not there", "/proc", ""])
def test_an_unusable_base_directory_is_skipped(tmp_path, base):
    temporary_dir = TemporaryDirectory({"TMPDIR": base}, elsewhere=("/proc", str(tmp_path)))
    assert temporary_dir.run_dir().startswith(str(tmp_path))
    temporary_dir.remove()


def test_without_a_usable_base_an_error_is_raised():
    with pytest.raises(OSError, match="temporary files"):
        TemporaryDirectory({}, elsewhere=()).run_dir()
    with pytest.raises(FileNotFoundError):
        TemporaryDirectory({}, elsewhere=("/proc",)).run_dir()


def test_a_run_directory_is_recognised_by_its_marker(tmp_path):
    assert not has_run_dir("")
    assert not has_run_dir(str(tmp_path))
    (tmp_path / MARKER).touch()
    assert has_run_dir(str(tmp_path))


def test_directories_of_killed_agents_are_removed_by_the_next_agent(tmp_path):
    killed, living = (TemporaryDirectory({}, elsewhere=[str(tmp_path)]) for _ in range(2))
    for each in (killed, living):
        each.run_dir()
    killed._unlock()  # as the kernel does
    (tmp_path / "distlaunch-agent-00000000-of-another-boot").mkdir()
    later = TemporaryDirectory({}, elsewhere=[str(tmp_path)])
    later.run_dir()
    assert not os.path.exists(killed.path)
    left = {living.path, later.path, str(tmp_path / "distlaunch-agent-00000000-of-another-boot")}
    assert {str(path) for path in tmp_path.iterdir()} == left
    living.remove()
    later.remove()
