"""If the kernel refuses a thread, the limit that is reached is named."""

from __future__ import annotations

import os
import resource

import pytest

from distlaunch.core.probe.process_limits import explain_refusal
from tests.facts import mentions


@pytest.fixture
def in_child():
    """Return a function that lowers a limit in a forked child and returns its explanation."""

    def run(lower) -> str:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                lower()
                os.write(writing, explain_refusal("/nowhere").encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, encoding="utf-8") as file:
            message = file.read()
        os.waitpid(pid, 0)
        return message

    return run


def test_a_full_cgroup_is_named(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    mount = "24 18 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(mount)
    step = tmp_path / "sys/fs/cgroup/job/step"
    step.mkdir(parents=True)
    (step / "pids.max").write_text("max\n")
    (step / "pids.current").write_text("7\n")
    (step.parent / "pids.max").write_text("100\n")
    (step.parent / "pids.current").write_text("50\n")
    assert mentions(explain_refusal(str(tmp_path)), "pids.max", "free -h")
    (step.parent / "pids.current").write_text("100\n")
    expected = "the cgroup's limit of 100 processes and threads is reached (pids.max)"
    assert explain_refusal(str(tmp_path)) == expected


def test_a_full_address_space_is_named(in_child):
    limit = 64 << 20

    def lower():
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    assert mentions(in_child(lower), "64 MiB", "ulimit -v")


def test_a_full_limit_of_processes_is_named(in_child):
    def lower():
        if os.getuid() == 0:
            os.setuid(65534)  # root has no such limit
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))

    assert mentions(in_child(lower), "1 processes", "ulimit -u")


def test_if_no_limit_is_reached_all_are_named(in_child):
    assert mentions(in_child(lambda: None), "ulimit -u", "ulimit -v", "pids.max", "free -h")
