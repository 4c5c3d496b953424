"""Writing a report to a file."""

from __future__ import annotations

import os
import stat

import pytest

from distlaunch.jobs.report.write_report import write_file


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("exists", [False, True])
def test_only_the_owner_can_read_a_report(tmp_path, exists):
    path = tmp_path / "report.html"
    if exists:
        path.write_text("old")
    write_file(str(path), "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.read_text() for each in tmp_path.iterdir()] == ["new"]
