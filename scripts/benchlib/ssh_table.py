"""The rows of `scripts/bench ssh`: what each measurement of ``ssh_rows`` has to reach."""

from __future__ import annotations

from .rows import Measurement, Row, ratio
from .ssh_rows import (
    ONE_MACHINE,
    closed,
    closed_deaf,
    cpu_per_node,
    failure8,
    first16,
    first32,
    flat,
    idle32,
    lines8,
    silent,
)

SSH = (
    Measurement(
        name="cpu",
        run=cpu_per_node,
        launchers=("distlaunch", "clush"),
        rows=(
            Row(
                key="cpu_per_node",
                title="launcher's processor time per node, its children's with it: a whole job, 32 "
                "hosts less one",
                unit="ms",
                goal="<= 25 ms",
                reached=lambda row: row["distlaunch"] <= 25,
            ),
        ),
    ),
    Measurement(
        name="first32",
        run=first32,
        launchers=("distlaunch", "clush", "pdsh", "ssh"),
        rows=(
            Row(
                key="first32",
                title="32 hosts: command to all workers' first instruction (clush, pdsh, ssh: "
                "`python3 -c pass` there)",
                unit="s",
                goal="<= 1.2x clush",
                reached=lambda row: row["distlaunch"] <= 1.2 * row["clush"],
            ),
        ),
    ),
    Measurement(
        name="first16",
        run=first16,
        launchers=("distlaunch", "mpirun"),
        rows=(
            Row(
                key="first16",
                title="16 hosts: command to all workers' first instruction",
                unit="s",
                goal="as fast as mpirun",
                reached=lambda row: ratio(row, "mpirun") >= 1,
            ),
        ),
    ),
    Measurement(
        name="failure8",
        run=failure8,
        launchers=("distlaunch", "mpirun"),
        rows=(
            Row(
                key="failure8",
                title="a worker's failure to the end of the workers on all 8 hosts",
                unit="s",
                goal="<= 1 s",
                reached=lambda row: row["distlaunch"] <= 1,
            ),
        ),
    ),
    Measurement(
        name="silent",
        run=silent,
        launchers=("distlaunch",),
        share=0.4,
        rows=(
            Row(
                key="silent",
                title="link of one of 4 nodes down (`--num-nodes 3:4`) to the others' workers "
                "having met again",
                unit="s",
                goal="<= 20 s",
                reached=lambda row: row["distlaunch"] <= 20,
            ),
        ),
    ),
    Measurement(
        name="closed_deaf",
        run=closed_deaf,
        launchers=("distlaunch",),
        share=0.4,
        rows=(
            Row(
                key="closed_deaf",
                title="channel of one of 4 nodes closed to workers having met again, those before "
                "deaf to SIGTERM",
                unit="s",
                goal="<= 7 s",
                reached=lambda row: row["distlaunch"] <= 7,
            ),
        ),
    ),
    Measurement(
        name="closed",
        run=closed,
        launchers=("distlaunch",),
        share=0.7,
        rows=(
            Row(
                key="closed",
                title="the same, with workers that obey",
                unit="s",
                goal="<= 2 s",
                reached=lambda row: row["distlaunch"] <= 2,
            ),
        ),
    ),
    Measurement(
        name="lines8",
        run=lines8,
        launchers=("distlaunch", ONE_MACHINE),
        share=0.4,
        rows=(
            Row(
                key="lines8",
                title="600,000 lines of 8 workers, on 8 hosts and on one machine: lines a second "
                "after the first start",
                unit="lines/s",
                goal="",
                reached=lambda _: True,
                more_is_better=True,
            ),
            Row(
                key="lines8_lost",
                title="of these, lost",
                unit="",
                goal="0",
                reached=lambda row: row["distlaunch"] == 0,
            ),
        ),
    ),
    Measurement(
        name="flat",
        run=flat,
        launchers=("distlaunch",),
        share=0.3,
        rows=(
            Row(
                key="flat",
                title="the launcher's memory over 3,000,000 such lines: last third less the second",
                unit="MiB",
                goal="<= 8 MiB",
                reached=lambda row: row["distlaunch"] <= 8,
            ),
        ),
    ),
    Measurement(
        name="idle32",
        run=idle32,
        launchers=("distlaunch",),
        share=0.3,
        rows=(
            Row(
                key="idle_cpu",
                title="launcher's processor time per minute, 32 idle nodes",
                unit="s",
                goal="",
                reached=lambda _: True,
            ),
            Row(
                key="idle_wakeups",
                title="how often a second it is woken",
                unit="",
                goal="",
                reached=lambda _: True,
            ),
            Row(
                key="memory_per_node",
                title="launcher's memory per node",
                unit="MiB",
                goal="",
                reached=lambda _: True,
            ),
        ),
    ),
)
