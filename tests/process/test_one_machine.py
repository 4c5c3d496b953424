"""Hosts that are one machine under two names: the job is refused, or uses each machine once."""

from __future__ import annotations

import os

import pytest

from tests.facts import mentions
from tests.sshd import Sshd

APART = "unshare --mount" if os.getuid() == 0 else "unshare --map-root-user --mount"


@pytest.fixture
def sshd(tmp_path):
    server = Sshd(tmp_path / "sshd")
    yield server
    server.close()


@pytest.fixture
def train(distlaunch, sshd):
    """Run a job on hosts that are all names of one sshd."""

    def run(names, *options, more=None):
        config = sshd.config(host=" ".join(names))
        if more is not None:
            config.write_text(config.read_text() + more.read_text())
        (distlaunch.work / "t.py").write_text("print('here')\n")
        words = ["--ssh-config", str(config), "--device", "cpu", "--format", "plain"]
        return distlaunch.train(*options, *words, "t.py")

    return run


def hosts(names, tmp_path, by):
    """Return the option that names hosts."""
    if by == "--hosts":
        return [by, ",".join(f"{name}:1" for name in names)]
    lines = "".join(f"{name} slots=1\n" for name in names)
    path = tmp_path / "hosts"
    path.write_text(lines)
    return [by, f"cat {path}" if by == "--discover" else str(path)]


@pytest.mark.parametrize("by", ["--hosts", "--hostfile"])
def test_a_machine_that_is_named_twice_is_refused_with_both_names(train, tmp_path, by):
    result = train(("here", "there"), *hosts(("here", "there"), tmp_path, by))
    assert result.returncode == 2, result.stderr
    assert mentions(result.stderr, "error", "here and there")
    assert "here:N" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("by", ["--hosts", "--discover"])
def test_a_job_that_may_have_fewer_nodes_goes_on_with_the_machine_once(train, tmp_path, by):
    result = train(("here", "there"), *hosts(("here", "there"), tmp_path, by), "--num-nodes", "1:2")
    assert result.returncode == 0, result.stderr
    left_out = [
        line for line in result.stderr.splitlines() if mentions(line, "there", "left out", "here")
    ]
    assert len(left_out) == 1
    assert result.stdout.count("here") == 1


def test_two_containers_on_one_machine_are_two_nodes(train, tmp_path):
    apart = Sshd(tmp_path / "apart", f'ForceCommand {APART} /bin/sh -c "$SSH_ORIGINAL_COMMAND"')
    try:
        names = ("here", "there")
        result = train(
            ("here",), *hosts(names, tmp_path, "--hosts"), more=apart.config(host="there")
        )
    finally:
        apart.close()
    assert result.returncode == 0, result.stderr
    assert "2 workers on 2 nodes" in result.stderr


def test_a_host_that_is_named_once_is_never_refused(train, tmp_path):
    result = train(("here",), *hosts(("here",), tmp_path, "--hosts"), "--max-restarts", "1")
    assert result.returncode == 0, result.stderr
