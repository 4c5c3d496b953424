"""What is read of the world around: host files, the systems' own files, names of this machine, --discover's words."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from distlaunch import surroundings
from distlaunch.core.errors import ConfigError
from distlaunch.resolve.identity import is_this_machine
from distlaunch.resolve.options import TrainOptions
from distlaunch.surroundings import own_identity, read_surroundings, run_discover

PATH = {"PATH": os.defpath}
HOSTS = "127.0.0.1 localhost\n127.0.1.1 n1.example.org n1\n10.0.0.7 n1-ib storage\n10.0.0.8 other\n"


def is_running(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def failed(command: str, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        run_discover(command, PATH, **kwargs)
    return caught.value.message


def test_this_machine_is_known_by_kernel_hosts_file_and_addresses():
    identity = own_identity("n1", HOSTS, ("10.0.0.7",))
    assert identity.fqdn == "n1.example.org"
    names = ["n1", "n1.example.org", "n1-ib", "storage", "10.0.0.7", "localhost", "n2", "other", "10.0.0.8"]
    assert [name for name in names if is_this_machine(name, identity)] == names[:6]


def test_a_command_gets_our_environment_and_no_stdin():
    assert run_discover('echo "$A:2"; cat', {**PATH, "A": "h"}) == "h:2\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 3", "exit code 3"),
        ("kill -TERM $$", "signal SIGTERM"),
        ("kill -40 $$", "signal 40"),
        ("echo one >&2; echo 'two \x1b[1m' >&2; exit 1", r"it said 'two \x1b[1m'"),
        ("no-such-command", "exit code 127"),
        ("yes", "printed over 1 MiB"),
    ],
)
def test_a_command_that_fails_is_quoted_with_its_last_words(monkeypatch, command, said):
    monkeypatch.setattr(surroundings, "_MOST_BYTES", 1 << 20)
    assert said in failed(command)


def test_a_command_that_does_not_end_is_killed_with_all_that_it_started(tmp_path):
    pids = tmp_path / "pids"
    message = failed(f"sleep 600 & echo $! > {pids}; echo slow >&2; wait", patience_s=0.2)
    assert "did not end in 0.2 s; it said 'slow'" in message
    stat = Path("/proc", pids.read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while is_running(stat):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_closes_its_output_and_runs_on_is_waited_for():
    assert run_discover("exec 2>&-; echo a; exec >&-; sleep 0.2", PATH) == "a\n"


def test_what_it_leaves_in_the_background_is_not_waited_for():
    assert run_discover("sleep 600 & echo a", PATH) == "a\n"


def test_the_files_that_a_system_names_are_read_and_others_are_none(tmp_path):
    (tmp_path / "nodes").write_text("n1\nn1\n")
    os.mkfifo(tmp_path / "pipe")
    for name, text in {"nodes": "n1\nn1\n", "missing": None, "pipe": None, ".": None}.items():
        path = str(tmp_path / name)
        around = read_surroundings(TrainOptions(), {"PBS_JOBID": "1.s", "PBS_NODEFILE": path})
        assert around.texts == {path: text}


def test_bytes_of_a_host_file_that_are_no_text_are_kept(tmp_path):
    (tmp_path / "hosts").write_bytes(b"a:1\n# \xff\n")
    path = str(tmp_path / "hosts")
    assert read_surroundings(TrainOptions(hostfile=path), {}).texts == {path: "a:1\n# \udcff\n"}


@pytest.mark.parametrize("path", ["no/such", "a\0b"])
def test_a_host_file_that_cannot_be_read_is_an_error(path):
    with pytest.raises(ConfigError, match=r"^--hostfile "):
        read_surroundings(TrainOptions(hostfile=path), {})
