"""Agents of a Slurm job with a fake srun."""

from __future__ import annotations

import threading

import pytest

from distlaunch.transport.connection import ConnectError, Target
from distlaunch.transport.slurm.nodes import SrunConnector
from distlaunch.transport.slurm.step import StepSettings
from tests.facts import mentions


class Ending:
    """A step that has printed everything, and has ended at the ``at``-th request."""

    def __init__(self, hosts, *, at: int) -> None:
        self.hosts = hosts
        self.lines = ["srun: error: no such step"]
        self.has_called = self.has_lost = False
        self._left = at

    @property
    def returncode(self) -> int | None:
        self._left -= 1
        return 3 if self._left <= 0 else None

    @property
    def is_over(self) -> bool:
        return self.returncode is not None

    def descriptors(self) -> dict[int, int]:
        return {}

    def send(self) -> None:
        pass

    def read(self) -> list[str]:
        return []

    def finish_reading(self) -> None:
        pass

    def how_ended(self) -> str:
        return f"srun ended with status {self.returncode}"

    def wait(self, until: float) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture
def make():
    """Return an object for two nodes whose steps end at the ``at``-th request."""
    made: list[SrunConnector] = []

    def making(at: int) -> SrunConnector:
        def start(argv, hosts, code, environ, *, kill_switch):
            return Ending(hosts, at=at)

        wanted = StepSettings(nodes=2, all_or_none=True, grace_s=5.0, inside=False)
        srun = SrunConnector(
            ["n1", "n2"],
            settings=wanted,
            code=b"",
            pythons=[],
            environ={},
            addresses=["127.0.0.1"],
            ports=[0],
            release="1",
            job_id="j",
            start_step=start,
        )
        made.append(srun)
        return srun

    yield making
    for srun in made:
        srun.close()


@pytest.mark.parametrize("at", range(1, 7))
def test_the_end_of_srun_is_reported_to_all_who_wait_whenever_it_comes(make, at):
    srun = make(at)
    failures = {}

    def wait(host: str) -> None:
        try:
            srun.open(Target(host=host), 3600.0)
        except ConnectError as exc:
            failures[host] = exc.failure.text

    waiting = [threading.Thread(target=wait, args=(host,), daemon=True) for host in ("n1", "n2")]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(30.0)
    assert set(failures) == {"n1", "n2"}
    for failure in failures.values():
        assert mentions(failure, "status 3", "srun: error: no such step")
