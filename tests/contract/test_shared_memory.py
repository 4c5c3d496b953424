from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m

SHARED_MEMORY = Path("/dev/shm")
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
MAKES = (
    "import os, signal\n"
    "name = '/dev/shm/{mark}_' + '_'.join(os.environ[each] for each in ('MASTER_ADDR', 'MASTER_PORT', 'RANK'))\n"
    "open(name, 'x').close()\n"
    "print('up', flush=True)\n"
)
WAITS = "while True: signal.pause()\n"


class Files:
    """Files in shared memory whose names nobody else has."""

    def __init__(self) -> None:
        self.mark = f"distlaunch-test-{os.urandom(8).hex()}"
        self.makes = MAKES.format(mark=self.mark)
        self.names = (self.mark + "_{address}_{port}_{rank}",)

    def make(self, end: str) -> None:
        (SHARED_MEMORY / f"{self.mark}_{end}").touch()

    @property
    def there(self) -> list[str]:
        return sorted(
            path.name[len(self.mark) + 1 :] for path in SHARED_MEMORY.glob(f"{self.mark}*")
        )


@pytest.fixture
def files():
    found = Files()
    yield found
    for end in found.there:
        (SHARED_MEMORY / f"{found.mark}_{end}").unlink()


def test_it_is_gone_when_the_attempt_is_and_that_of_others_is_not(coordinator, files):
    others = ["127.0.0.1_29500_2", "127.0.0.1_29501_0", "127.0.0.2_29500_0"]
    for name in others:
        files.make(name)
    coordinator.start(
        files.makes,
        files.makes + "os.kill(os.getpid(), 9)\n",
        env=MASTER,
        shared_memory=files.names,
    )
    coordinator.until(m.AttemptEnded)
    assert {one.rank: one.returncode for one in coordinator.of(WorkerExit)} == {
        0: 0,
        1: -signal.SIGKILL,
    }
    assert files.there == others


def test_the_next_attempt_finds_and_leaves_nothing(coordinator, files):
    for attempt in (0, 1):
        coordinator.start(files.makes, attempt=attempt, env=MASTER, shared_memory=files.names)
        coordinator.until(m.AttemptEnded, attempt + 1)
        assert files.there == []
    assert [one.returncode for one in coordinator.of(WorkerExit)] == [0, 0]


def test_after_its_attempt_a_name_is_somebody_elses(coordinator, files):
    coordinator.start(files.makes, env=MASTER, shared_memory=files.names)
    coordinator.until(m.AttemptEnded)
    files.make("127.0.0.1_29500_0")
    coordinator.close()
    assert files.there == ["127.0.0.1_29500_0"]


def test_after_its_attempt_a_name_is_somebody_elses_also_when_the_spawner_is_killed(
    coordinator, files
):
    coordinator.start(
        files.makes + "print(os.getppid(), '.')\n", env=MASTER, shared_memory=files.names
    )
    coordinator.until(m.AttemptEnded)
    files.make("127.0.0.1_29500_0")
    coordinator.until_written(0, b".\n")
    os.kill(int(coordinator.taken.written[0, 1].split()[1]), signal.SIGKILL)
    coordinator.until(m.AgentFailed)
    assert files.there == ["127.0.0.1_29500_0"]


def test_close_leaves_nothing_of_workers_that_still_run(coordinator, files):
    coordinator.start(files.makes + WAITS, env=MASTER, shared_memory=files.names)
    coordinator.until_written(0, b"up")
    assert files.there == ["127.0.0.1_29500_0"]
    coordinator.close()
    assert files.there == []


def test_a_spawner_that_is_killed_leaves_nothing(coordinator, files):
    coordinator.start(
        files.makes + "os.kill(os.getppid(), 9)\n" + WAITS, env=MASTER, shared_memory=files.names
    )
    coordinator.until(m.AgentFailed)
    coordinator.until_written(0, b"up\n")
    assert files.there == []
