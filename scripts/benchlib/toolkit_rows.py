"""Measurements of the toolkit and of whole trainings: `scripts/bench toolkit`, `scripts/bench
scaling`."""

from __future__ import annotations

from pathlib import Path

from .launchers import Launcher
from .process import Command, cpu_s, running
from .rows import Measurement, Row, Sample, Scale, expect


def overhead(launcher: Launcher, scale: Scale) -> Sample:
    """Compare steps within one job, in turns: between two jobs the machine changes more than is to
    be seen."""
    worker = ["toolkit_steps.py", str(2 * scale.steps)]
    with running(lambda directory: launcher.command(2, worker, directory)) as command:
        expect(command, command.wait(within_s=300), 0)
        return {
            "toolkit_overhead": max(command.stamps("overhead_ppm", 0, 2, within_s=1)) / 1e4,
            "step_us": command.stamps("step_ns", 0, 2, within_s=1)[0] / 1e3,
            "heartbeat_us": max(command.stamps("beat_ns", 0, 2, within_s=1)) / 1e3,
        }


def scaling(launcher: Launcher, scale: Scale) -> Sample:
    """Train with one worker, then with two, which do twice the work together."""
    alone, _, _ = _train(launcher, scale, 1)
    together, share, whole_share = _train(launcher, scale, 2)
    return {
        "efficiency": 100 * alone / together,
        "launcher_share": 100 * share,
        "launcher_share_from_its_start": 100 * whole_share,
        "alone_s": alone,
        "together_s": together,
    }


def _train(launcher: Launcher, scale: Scale, workers: int) -> tuple[float, float, float]:
    """Return how long the steps took, and the launcher's part of all processor time: in them, and
    from its start."""
    with running(
        lambda directory: launcher.command(workers, ["scale.py", str(scale.steps)], directory)
    ) as command:
        began = command.stamps("began", 0, workers, within_s=120)
        before = _launcher_s(command, workers)
        done = command.stamps("done", 0, workers, within_s=600)
        after = _launcher_s(command, workers)
        cpu = [
            sum(command.stamps(name, 0, workers, within_s=1)) / 1e9
            for name in ("cpu_before", "cpu_after")
        ]
        Path(command.directory, "looked").touch()
        expect(command, command.wait(within_s=60), 0)
    in_steps = after - before
    return (
        (max(done) - min(began)) / 1e9,
        in_steps / (in_steps + cpu[1] - cpu[0]),
        after / (after + cpu[1]),
    )


def _launcher_s(command: Command, workers: int) -> float:
    """Return the processor time of the launcher and its helpers."""
    pids = command.stamps("pid", 0, workers, within_s=1)
    return sum(
        cpu_s(pid)
        for pid in [command.pid, *(each for each in command.related() if each not in pids)]
    )


TOOLKIT = (
    Measurement(
        name="overhead",
        run=overhead,
        launchers=("distlaunch",),
        rows=(
            Row(
                key="toolkit_overhead",
                title="a step with `wrap` and `heartbeat` over one with DDP by hand, 2 workers, "
                "64-128-10",
                unit="%",
                goal="< 1 %",
                reached=lambda row: row["distlaunch"] < 1,
            ),
        ),
    ),
)

SCALING = (
    Measurement(
        name="scaling",
        run=scaling,
        launchers=("distlaunch", "torchrun"),
        share=0.6,
        rows=(
            Row(
                key="efficiency",
                title="two CPU workers beside one, the same work for each",
                unit="%",
                goal="torchrun's",
                more_is_better=True,
                reached=lambda row: row["distlaunch"] >= 0.97 * row["torchrun"],
            ),
            Row(
                key="launcher_share",
                title="the launcher's part of the processor time of these steps",
                unit="%",
                goal="< 0.5 %",
                reached=lambda row: row["distlaunch"] < 0.5,
            ),
        ),
    ),
)
