from __future__ import annotations

import os

import pytest

from distlaunch.coordinator.runtime.run_directory import join_run_dir, make_run_dir


@pytest.fixture
def joined(tmp_path):
    """Make launcher 1 of job ``j`` join a folder of this name. Return its path."""

    def join(folder: str) -> str:
        run_dir = join_run_dir(str(tmp_path), folder, {}, node=1, job_id="j")
        run_dir.close()
        return os.path.relpath(run_dir.path, tmp_path)

    return join


def test_a_launcher_has_the_folder_of_its_job_and_again_when_it_is_replaced(tmp_path, joined):
    make_run_dir(str(tmp_path), "j-2", {}, job_id="j").close()
    assert [joined("j-2"), joined("j-2")] == ["j-2", "j-2"]
    assert sorted(os.listdir(tmp_path / "j-2")) == [
        ".distlaunch-run",
        "events-1.jsonl",
        "events.jsonl",
    ]


def test_where_the_coordinators_folder_is_not_to_be_seen_launchers_share_their_own(joined):
    assert [joined("j"), joined("j")] == ["j", "j"]


@pytest.mark.parametrize("kind", ["another job's", "a link", "nobody's", "without a name"])
def test_no_launcher_enters_what_is_not_its_jobs(tmp_path, joined, kind):
    if kind == "nobody's":
        (tmp_path / "old").mkdir()
    else:
        make_run_dir(str(tmp_path), "old", {}, job_id="j" if kind == "a link" else "other").close()
    if kind == "without a name":
        (tmp_path / "old" / ".distlaunch-run").write_bytes(b"")
    name = "old"
    if kind == "a link":
        name = "link"
        (tmp_path / name).symlink_to("old")
    before = sorted(os.listdir(tmp_path / "old"))
    assert joined(name) == f"{name}-2"
    assert sorted(os.listdir(tmp_path / "old")) == before
