from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.facts import mentions

torch = pytest.importorskip("torch")

from torch import nn

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint import directory
from distlaunch.toolkit.checkpoint.checkpoint import (
    Checkpoint,
    not_shared,
)
from distlaunch.toolkit.checkpoint.directory import Folder
from distlaunch.toolkit.checkpoint.storage import CheckpointError, PlaceLostError


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(directory, "_WAIT_S", 0.0)


@pytest.fixture
def claimed(tmp_path):
    folder = Folder(str(tmp_path))
    folder.claim()
    yield folder
    folder.release()


def another_process_gets(where):
    program = (
        "import sys; from distlaunch.toolkit.checkpoint import directory as module; module._WAIT_S = 0.0\n"
        "from distlaunch.core.errors import ConfigError\n"
        "try: module.Folder(sys.argv[1]).claim()\n"
        "except ConfigError as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", program, str(where)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return "in use by" not in ended.stdout


def test_reading_the_lock_file_gives_nothing_up(claimed, tmp_path):
    shutil.copytree(tmp_path, tmp_path.with_name("backup"))
    assert not another_process_gets(tmp_path)
    claimed.release()
    assert another_process_gets(tmp_path)


def test_a_forked_child_does_not_keep_the_lock(claimed, tmp_path):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        assert not another_process_gets(tmp_path)
        claimed.release()
        assert another_process_gets(tmp_path)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_one_process_has_a_directory_once_under_whatever_name(claimed, tmp_path):
    link = tmp_path.with_name("link")
    link.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="another Checkpoint"):
        Folder(str(link)).claim()
    assert not another_process_gets(tmp_path)


def test_a_directory_that_is_removed_or_replaced_is_not_written_to(claimed, tmp_path):
    claimed.check_claim()
    shutil.rmtree(tmp_path)
    with pytest.raises(PlaceLostError, match="removed"):
        claimed.check_claim()
    tmp_path.mkdir()
    (tmp_path / ".lock").write_text("{}")
    with pytest.raises(PlaceLostError, match="replaced"):
        claimed.check_claim()


def test_a_job_that_came_where_there_are_no_locks_is_noticed(claimed, tmp_path):
    (tmp_path / ".lock").write_text(json.dumps({"mark": "another"}))
    with pytest.raises(CheckpointError, match="another job"):
        claimed.check_claim()


def test_a_lock_file_that_is_a_hard_link_is_refused_and_the_other_file_kept(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "other").write_text("mine")
    os.link(tmp_path / "other", tmp_path / "c" / ".lock")
    with pytest.raises(ConfigError, match=r"\.lock: .* hard link"):
        Folder(f"{tmp_path}/c").claim()
    assert (tmp_path / "other").read_text() == "mine"


def test_a_directory_that_was_copied_by_hard_links_can_be_used(claimed, tmp_path):
    """``cp -al`` and ``rsync --link-dest`` make such a copy, with the lock file."""
    claimed.release()
    (tmp_path / "copy").mkdir()
    os.link(tmp_path / ".lock", tmp_path / "copy" / ".lock")
    copied = Folder(f"{tmp_path}/copy")
    copied.claim()
    copied.check_claim()
    copied.release()


def test_a_lock_file_that_is_a_link_is_refused_and_its_target_kept(tmp_path):
    (tmp_path / "notes").write_text("of mine")
    (tmp_path / ".lock").symlink_to("notes")
    with pytest.raises(ConfigError, match=r"\.lock .* symbolic link"):
        Folder(str(tmp_path)).claim()
    assert (tmp_path / "notes").read_text() == "of mine"


def test_a_disk_that_is_full_of_a_half_written_save_is_cleaned_although_there_is_no_lock(
    tmp_path, monkeypatch
):
    half, real = tmp_path / ".saving-step-000000001-0123abcd", os.open
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")

    def full(path, *rest, **options):
        if str(path).endswith(".lock") and half.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", full)
    folder = Folder(str(tmp_path))
    folder.claim()
    folder.release()
    assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize(("call", "number"), [("open", errno.EROFS), ("pwrite", errno.ENOSPC)])
def test_a_read_only_directory_can_be_read(tmp_path, monkeypatch, call, number):
    checkpoint = Checkpoint(tmp_path, model=nn.Linear(2, 1))
    checkpoint.save(0)
    checkpoint.save(1)
    checkpoint.close()
    real = getattr(os, call)

    def fail(where, *rest):
        if call == "pwrite" or str(where).endswith(".lock"):
            raise OSError(number, os.strerror(number))
        return real(where, *rest)

    monkeypatch.setattr(os, call, fail)
    reader = Checkpoint(tmp_path, model=nn.Linear(2, 1))
    assert reader.resume(1) == 1
    with pytest.raises(CheckpointError, match=os.strerror(number)):
        reader.save(5)
    reader.close()
    assert {"step-000000001", "step-000000002"} <= set(os.listdir(tmp_path))
    monkeypatch.undo()
    writer = Checkpoint(tmp_path, model=nn.Linear(2, 1))  # nothing is held after it
    assert writer.resume() == 2
    writer.close()


def test_this_jobs_own_lock_on_a_node_that_died_is_waited_for_longer(monkeypatch):
    monkeypatch.setenv("DISTLAUNCH_JOB_ID", "a")
    assert directory._is_of_a_lost_node({"job": "a", "host": "gone"})
    assert not directory._is_of_a_lost_node({"job": "b", "host": "gone"})
    assert not directory._is_of_a_lost_node({"job": "a", "host": os.uname().nodename})
    monkeypatch.delenv("DISTLAUNCH_JOB_ID")
    assert not directory._is_of_a_lost_node({"job": None, "host": "gone"})


def test_a_mark_of_another_directory_is_not_seen(tmp_path):
    one, other = Folder(str(tmp_path / "one")), Folder(str(tmp_path / "other"))
    one.claim()
    other.claim()
    assert one.sees(one.mark())
    assert not other.sees(one.mark())
    one.release()
    other.release()


def test_workers_that_were_given_other_places_get_a_notice_and_hosts_only_where_they_were_not():
    places = [("a", "/x/0", True), ("b", "/x/0", False), ("a", "/x/2", False)]
    assert mentions(not_shared(places), "rank 2", "/x/2")
    assert mentions(not_shared(places[:2]), "/x/0: b and a")


@pytest.mark.parametrize("file", ["manifest.json", ".metadata", "__0_0.distcp"])
def test_a_fifo_in_a_checkpoint_is_damage_and_nothing_waits_for_it(tmp_path, caplog, file):
    checkpoint = Checkpoint(tmp_path, model=nn.Linear(2, 1))
    checkpoint.save(0)
    checkpoint.save(1)
    (tmp_path / "step-000000002" / file).unlink()
    os.mkfifo(tmp_path / "step-000000002" / file)
    assert checkpoint.resume() == 1
    checkpoint.close()
    assert "step-000000002 is damaged: " in caplog.text
    assert mentions(caplog.text, "regular file", "skipped")


def test_the_mark_is_on_the_disk_when_other_nodes_look_for_it(tmp_path, monkeypatch):
    """An NFS client writes at the latest when a file is closed, and the lock file stays open."""
    synced = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: synced.append((os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size)),
    )
    folder = Folder(str(tmp_path))
    folder.claim()
    assert (f"{tmp_path}/.lock", (tmp_path / ".lock").stat().st_size) in synced
    folder.release()
