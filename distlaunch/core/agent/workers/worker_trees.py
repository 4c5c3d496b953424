"""Find the processes below the workers of one attempt, and ask them to end. Used by the spawner.

The spawner is a subreaper, so a process below an exited worker is a child of the spawner (the top
of a tree) or a descendant of one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping

from distlaunch.core.agent.workers import process_tree
from distlaunch.core.protocol import spawner_messages as w

_SHOWN = 8
"""Largest number of processes that a message names."""


class WorkerTrees:
    """Records from which worker a process descends, and which processes have been asked to end."""

    def __init__(self, cookie: str) -> None:
        """``cookie`` marks the environment of this agent's workers."""
        self._cookie = cookie
        self._ranks: dict[int, int] = {}  # session of a worker -> its rank
        self._asked: dict[int, int] = {}  # pid -> start time
        self._seen: dict[
            int, int
        ] = {}  # tops whose trees have been asked to end: pid -> start time
        self._with_worker: dict[
            int, int
        ] = {}  # killed together with their worker: pid -> start time
        self._ended = _Tally()
        self._killed = _Tally()

    def add_worker(self, pid: int, rank: int) -> None:
        """Add a worker."""
        self._ranks[pid] = rank

    def find_leftovers(self, running: Mapping[int, int], helpers: Collection[int]) -> list[int]:
        """Return the pids of leftovers: processes that exited workers have started, and that are
        now children of this process.

        Cleaners (``is_cleaner``) are omitted. ``running`` is pid -> rank of running workers.
        ``helpers`` are children that are not from workers. A child of an unknown worker is returned
        only if no worker runs.
        """
        ranks = set(running.values())
        found = []
        for pid in process_tree.children_of(os.getpid()):
            if pid in running or pid in helpers:
                continue
            facts = process_tree.stat_of(pid)
            if facts is None or facts[0] in "ZX" or process_tree.is_cleaner(pid):
                continue
            if running and (
                (rank := self._rank_of(pid, session=facts[2])) is None or rank in ranks
            ):
                continue
            found.append(pid)
        return found

    def _rank_of(self, pid: int, *, session: int) -> int | None:
        rank = self._ranks.get(session)
        return process_tree.cookie_rank(pid, self._cookie) if rank is None else rank

    def _processes_of(self, tops: Iterable[int]) -> Iterator[tuple[int, int, int | None]]:
        """Yield pid, start time and rank of each process of these trees, except cleaners."""
        for top in tops:
            of_top: int | None = None
            for pid in (top, *process_tree.descendants_of(top)):
                facts = process_tree.stat_of(pid)
                if facts is None or facts[0] in "ZX" or process_tree.is_cleaner(pid):
                    continue
                rank = self._rank_of(pid, session=facts[2])
                of_top = rank if pid == top else of_top
                yield pid, facts[3], of_top if rank is None else rank

    # --- asking to end

    def record_group_signal(self, worker: int, signum: int) -> None:
        """Record the processes of a worker's group that get a stop signal now.

        For INT, only those that catch it, because shells start background processes with INT
        ignored.
        """
        for pid in process_tree.descendants_of(worker):
            facts = process_tree.stat_of(pid)
            if (
                facts is not None
                and facts[4] == worker
                and (signum != signal.SIGINT or process_tree.catches(pid, signum))
            ):
                self._asked[pid] = facts[3]

    def record_outside_signal(self) -> None:
        """Record that another program has asked all processes to end."""
        for pid in process_tree.descendants_of(os.getpid()):
            facts = process_tree.stat_of(pid)
            if facts is not None:
                self._asked[pid] = facts[3]

    def ask_to_end(self, tops: Iterable[int]) -> None:
        """Send TERM to each process of these trees that has not got it.

        A process that works for its parent, or has started after its parent got TERM, is left to
        the parent: a worker that saves a checkpoint needs its data loaders. It gets TERM after the
        parent has ended.
        """
        for top in tops:
            facts = process_tree.stat_of(top)
            if facts is None or self._seen.get(top) == facts[3]:
                continue
            self._seen[top] = facts[3]
            to_ask = [(top, True)]
            while to_ask:
                pid, is_top = to_ask.pop()
                facts = process_tree.stat_of(pid)
                if facts is None or facts[0] in "ZX" or self._asked.get(pid) == facts[3]:
                    continue
                if not is_top and (
                    process_tree.is_cleaner(pid) or process_tree.is_part_of_parent(pid, facts[1])
                ):
                    continue
                to_ask += [(child, False) for child in process_tree.children_of(pid)]
                self._asked[pid] = facts[3]
                self._ended.add(pid, facts[3], self._rank_of(pid, session=facts[2]))
                process_tree.send(pid, signal.SIGTERM, parent_or_ancestor=os.getpid())
                process_tree.send(pid, signal.SIGCONT, parent_or_ancestor=os.getpid())

    # --- counting

    def record_killed_with_worker(self, worker: int) -> None:
        """Record the processes below a worker that are killed together with it. They do not count
        as leftovers."""
        for pid in process_tree.descendants_of(worker):
            facts = process_tree.stat_of(pid)
            if facts is not None:
                self._with_worker[pid] = facts[3]

    def count_killed(self, tops: Iterable[int]) -> None:
        """Count the processes of these trees as killed, except workers and processes killed
        together with theirs."""
        for pid, started, rank in self._processes_of(tops):
            if pid not in self._ranks and self._with_worker.get(pid) != started:
                self._ended.add(pid, started, rank)
                self._killed.add(pid, started, rank)

    def describe(self, tops: Iterable[int]) -> w.Leftovers:
        """Return a description of the processes of these trees."""
        found = _Tally()
        for pid, started, rank in self._processes_of(tops):
            found.add(pid, started, rank)
        return found.leftovers()

    @property
    def ended(self) -> w.Leftovers:
        """The processes left by exited workers that were asked to end or killed."""
        return self._ended.leftovers()

    @property
    def killed(self) -> w.Leftovers:
        """The processes left by exited workers that were killed."""
        return self._killed.leftovers()


class _Tally:
    def __init__(self) -> None:
        self._counted: set[tuple[int, int]] = set()
        self._shown: list[w.LeftoverProcess] = []

    def add(self, pid: int, started: int, rank: int | None) -> None:
        if (pid, started) in self._counted:
            return
        self._counted.add((pid, started))
        if len(self._shown) < _SHOWN:
            self._shown.append(
                w.LeftoverProcess(rank=rank, pid=pid, command=process_tree.command_line(pid))
            )

    def leftovers(self) -> w.Leftovers:
        return w.Leftovers(count=len(self._counted), shown=tuple(self._shown))
