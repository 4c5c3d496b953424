from __future__ import annotations

import os

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.launch.surroundings import own_identity, read_host_file, read_surroundings
from distlaunch.planning.hosts.this_host import is_this_machine
from distlaunch.planning.train_options import TrainOptions

HOSTS = "127.0.0.1 localhost\n127.0.1.1 n1.example.org n1\n10.0.0.7 n1-ib storage\n10.0.0.8 other\n"


def test_this_machine_is_known_by_kernel_hosts_file_and_addresses():
    identity = own_identity("n1", HOSTS, ("10.0.0.7",))
    assert identity.fqdn == "n1.example.org"
    names = [
        "n1",
        "n1.example.org",
        "n1-ib",
        "storage",
        "10.0.0.7",
        "localhost",
        "n2",
        "other",
        "10.0.0.8",
    ]
    assert [name for name in names if is_this_machine(name, identity)] == names[:6]


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


def test_a_systems_file_that_has_nothing_to_read_or_too_much_is_none(tmp_path):
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", (64 << 20) + 1)
    path = str(tmp_path / "huge")
    assert read_surroundings(TrainOptions(), {"PBS_JOBID": "1.s", "PBS_NODEFILE": path}).texts == {
        path: None
    }


def test_a_host_file_may_be_a_pipe_but_has_to_end(tmp_path):
    ours, theirs = os.pipe()
    os.write(theirs, b"a:1\n")
    os.close(theirs)
    path = f"/dev/fd/{ours}"
    assert read_surroundings(TrainOptions(hostfile=path), {}).texts == {path: "a:1\n"}
    os.close(ours)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match=r"0.05"):
        read_host_file(str(tmp_path / "fifo"), "--hostfile", timeout_s=0.05)
    with pytest.raises(ConfigError, match=r"more than 64 MiB"):
        read_surroundings(TrainOptions(hostfile="/dev/zero"), {})
