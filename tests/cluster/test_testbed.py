"""The test bed itself: it leaves nothing behind, whoever is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import sandbox

TESTBED = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "testbed"), "slurm"]


class Held:
    """A test bed of one test, held by the pipe to its keeper."""

    def __init__(self, tracker: str) -> None:
        self.keeper = subprocess.Popen(
            [*TESTBED, "hold", "--tracker", tracker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        answer = json.loads(self.keeper.stdout.readline())
        if "error" in answer:
            self.keeper.communicate(timeout=60)
            pytest.skip(f"Slurm cannot run here: {answer['error']}")
        self.directory, self.enter = answer["directory"], answer["enter"]
        # Held open, as a namespace that is gone leaves its number to the next one, which may be
        # another test's.
        self.held = os.open(
            f"/proc/{self.enter[1].removeprefix('--target=')}/ns/pid", os.O_RDONLY | os.O_CLOEXEC
        )
        self.namespace = os.readlink(f"/proc/self/fd/{self.held}")
        self.env = {"PATH": os.environ["PATH"], "HOME": "/", **answer["environment"]}

    def leave_a_daemon(self) -> int:
        """Make a job leave a process in a session of its own that only KILL ends. Return its pid on
        this machine."""
        daemon = Path(self.directory, "daemon.sh")
        daemon.write_text("trap '' TERM HUP INT; echo >$0.ready; while :; do sleep 60; done")
        job = "trap '' TERM HUP INT; setsid sh $0 & sleep 60"
        client = subprocess.Popen(
            [*self.enter, "srun", "-N1", "-n1", "sh", "-c", job, daemon],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(lambda: os.path.exists(f"{daemon}.ready"), "sign of the job's daemon")
            leaders = [pid for pid in self.processes() if os.getsid(pid) == pid]
            (pid,) = [pid for pid in leaders if command(pid) == f"sh {daemon}"]
        finally:
            client.kill()
            client.wait()
        return pid

    def processes(self) -> list[int]:
        """Return the processes in the test bed's namespace, without zombies."""
        found = []
        for name in os.listdir("/proc"):
            try:
                if (
                    name.isdigit()
                    and os.readlink(f"/proc/{name}/ns/pid") == self.namespace
                    and command(int(name))
                ):
                    found.append(int(name))
            except OSError:
                continue
        return found

    def traces(self) -> list[str]:
        """Return what is left of the test bed on this machine."""
        name = os.path.basename(self.directory)
        left = [f"process {pid}: {command(pid)}" for pid in self.processes()]
        left += [path for path in (self.directory,) if os.path.exists(path)]
        left += [line for line in Path("/proc/mounts").read_text().splitlines() if name in line]
        groups = subprocess.run(
            ["find", "/sys/fs/cgroup", "-name", name], capture_output=True, text=True
        )
        return left + groups.stdout.split()

    def close(self) -> None:
        self.keeper.kill()
        self.keeper.wait()
        self.keeper.stdin.close()
        self.keeper.stdout.close()
        os.close(self.held)
        if os.path.exists(self.directory):
            down(self.directory)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def down(*words: str) -> str:
    return subprocess.run(
        [*TESTBED, "down", *words], capture_output=True, text=True, timeout=60, check=True
    ).stderr


def wait_for(condition, what: str, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in {within_s} s"
        time.sleep(0.01)


@pytest.fixture
def held():
    testbed = Held("cgroup")
    yield testbed
    testbed.close()


def test_the_end_of_its_user_takes_everything_down(held):
    daemon = held.leave_a_daemon()
    assert held.traces()
    held.keeper.stdin.close()  # as the kernel does when the user is killed
    assert held.keeper.wait(timeout=30) == 0
    assert not os.path.exists(f"/proc/{daemon}")
    assert held.traces() == []


def test_down_finds_what_a_killed_keeper_left(held):
    daemon = held.leave_a_daemon()
    held.keeper.kill()
    held.keeper.wait()
    wait_for(lambda: not os.path.exists(f"/proc/{daemon}"), "end of the job's daemon")
    assert f"{held.directory} is gone" in down()
    assert held.traces() == []


def test_a_frozen_job_cannot_hold_it_up():
    testbed = Held("cgroup")
    try:
        daemon = testbed.leave_a_daemon()
        (group,) = [
            line.split(":")[2]
            for line in Path(f"/proc/{daemon}/cgroup").read_text().split()
            if ":freezer:" in line
        ]
        state = Path(
            f"/proc/{testbed.keeper.pid}/root{testbed.directory}/cgroup/freezer{group}/freezer.state"
        )
        state.write_text("FROZEN")
        testbed.keeper.terminate()
        assert testbed.keeper.wait(timeout=30) == 0
        assert testbed.traces() == []
    finally:
        testbed.close()


def test_a_group_that_vanishes_meanwhile_needs_no_thaw(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "freezer.state").write_text("FROZEN")
    (tmp_path / "b" / "freezer.state").unlink()
    (tmp_path / "b" / "freezer.state").symlink_to(tmp_path / "gone" / "freezer.state")
    sandbox._thaw(str(tmp_path))
    assert [(tmp_path / name / "freezer.state").read_text() for name in ("a", "c")] == [
        "THAWED"
    ] * 2


def test_up_stays_until_down():
    done = subprocess.run([*TESTBED, "up"], capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"Slurm cannot run here: {done.stderr}")
    directory = done.stdout.splitlines()[0].removeprefix("# ")
    try:
        listed = subprocess.run(
            [*TESTBED, "list"], capture_output=True, text=True, timeout=30
        ).stdout
        assert f"{directory}  up" in listed
        exported = subprocess.run(
            [*TESTBED, "env", directory], capture_output=True, text=True, timeout=30
        ).stdout
        assert exported == done.stdout
    finally:
        down(directory)
    assert not os.path.exists(directory)
