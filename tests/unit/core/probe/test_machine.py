from __future__ import annotations

import hashlib
import os
import socket

import pytest

from distlaunch.core.probe import machine
from tests.facts import mentions


@pytest.fixture
def beats():
    return []


def test_a_large_script_is_hashed_in_pieces_with_beats(tmp_path, beats):
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    found = machine.script_digest(str(path), lambda: beats.append(1))
    assert found == (hashlib.sha256(bytes(200 << 20)).hexdigest(), None)
    assert len(beats) == 3


def test_a_missing_script_is_no_problem(tmp_path, beats):
    for path in ("none.py", "none/none.py", "nul\0.py"):
        assert machine.script_digest(str(tmp_path / path), beats.clear) == (None, None)


def test_a_script_that_cannot_be_read_is_a_problem(tmp_path, beats):
    os.symlink("loop", tmp_path / "loop")
    digest, problem = machine.script_digest(str(tmp_path / "loop"), beats.clear)
    assert digest is None
    assert mentions(problem, tmp_path / "loop", "Too many levels of symbolic links")


def test_a_forbidden_directory_and_a_missing_one_are_different_problems(tmp_path, monkeypatch):
    monkeypatch.chdir("/")

    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.os, "chdir", refuse)
    assert mentions(machine.enter_directory(str(tmp_path)), tmp_path, "Permission denied")
    assert mentions(machine.enter_directory("a\0b"), "'a\\x00b'")


def test_programs_are_searched_as_exec_does(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("tool", "plain"):
        (tmp_path / "bin" / name).touch()
    (tmp_path / "bin" / "tool").chmod(0o755)
    find = machine.find_program
    assert find(("plain", "tool"), "/", str(tmp_path / "bin")) == str(tmp_path / "bin" / "tool")
    assert find(("bin/tool",), str(tmp_path), None) == "bin/tool"
    assert find(("bin/plain", "bin", "./tool", ""), str(tmp_path), "/nowhere") is None


def test_resolving_the_own_name_has_a_timeout(monkeypatch):
    import threading

    asked = threading.Event()
    answered = threading.Event()

    def hangs(*_args, **_kwargs):
        asked.set()
        answered.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    assert machine.resolve_own_name("me", within_s=0.05) == ()
    assert asked.is_set()
    answered.set()


def test_the_resolvers_order_is_kept(monkeypatch):
    found = [
        (socket.AF_INET6, 1, 6, "", ("fe80::1%eth0", 0, 0, 2)),
        (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0)),
        (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)
    assert machine.resolve_own_name("me") == ("fe80::1", "10.0.0.1")


def test_only_variables_about_devices_are_kept():
    assert machine.device_environ(
        {"CUDA_VISIBLE_DEVICES": "0", "HOME": "/", "NCCL_SOCKET_IFNAME": "ib0"}
    ) == {"CUDA_VISIBLE_DEVICES": "0", "NCCL_SOCKET_IFNAME": "ib0"}
