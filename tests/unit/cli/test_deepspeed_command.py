from __future__ import annotations

import os
import resource
import subprocess

import pytest

from distlaunch.cli.compat.deepspeed.command import pid_file
from distlaunch.core.errors import ConfigError


def test_the_file_is_there_as_long_as_the_job(tmp_path):
    path = tmp_path / f"{os.getpid()}.deepspeed"
    with pid_file(str(tmp_path)):
        assert path.read_text() == str(os.getpid())
    assert not path.exists()


def test_a_file_that_somebody_removed_is_no_failure(tmp_path):
    with pid_file(str(tmp_path)):
        (tmp_path / f"{os.getpid()}.deepspeed").unlink()


def test_the_file_of_a_process_that_was_killed_is_taken_over(tmp_path):
    path = tmp_path / f"{os.getpid()}.deepspeed"
    killed = subprocess.Popen(["true"])
    killed.wait()
    for number in (
        os.getpid(),
        killed.pid,
    ):  # ours, which was its own; or what DeepSpeed's launcher had started
        path.write_text(str(number))
        with pid_file(str(tmp_path)):
            assert path.read_text() == str(os.getpid())
        assert not path.exists()


@pytest.mark.parametrize("text", ["theirs", "", str(os.getppid()), "²"])
def test_a_file_that_names_no_process_that_is_gone_is_left_alone(tmp_path, text):
    path = tmp_path / f"{os.getpid()}.deepspeed"
    path.write_text(text)
    with pytest.raises(ConfigError, match="File exists"), pid_file(str(tmp_path)):
        pass
    assert path.read_text() == text


def test_anything_but_a_plain_file_is_left_alone(tmp_path):
    path = tmp_path / f"{os.getpid()}.deepspeed"
    other = tmp_path / "other"
    other.write_text(str(os.getpid()))
    for make in (lambda: path.symlink_to(other), lambda: os.mkfifo(path)):
        make()
        with pytest.raises(ConfigError, match="File exists"), pid_file(str(tmp_path)):
            pass
        path.unlink()
    assert other.exists()


def test_the_file_of_another_is_left_alone(tmp_path):
    path = tmp_path / f"{os.getpid()}.deepspeed"
    path.write_text("theirs")
    with (
        pytest.raises(ConfigError, match=f"--save_pid: {path}: File exists"),
        pid_file(str(tmp_path)),
    ):
        pass
    assert path.read_text() == "theirs"


def test_a_file_that_cannot_be_written_is_reported_and_does_not_stay(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with (
            pytest.raises(ConfigError, match=r"\.deepspeed: File too large"),
            pid_file(str(tmp_path)),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(ConfigError, match="No such file or directory"),
        pid_file(str(tmp_path / "none")),
    ):
        pass
