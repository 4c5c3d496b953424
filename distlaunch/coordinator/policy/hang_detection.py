"""Decide whether silent workers hang, and find the ranks that the others wait for. No I/O.

A worker is silent while it writes no output and reports no progress. A sample is one collection of
all workers' stacks and processor times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from distlaunch.coordinator.policy.attempt import Attempt
from distlaunch.coordinator.policy.events_and_actions import (
    Action,
    RecordEvent,
    SendToNode,
    ShowMessage,
    WriteStacks,
)
from distlaunch.coordinator.policy.job_progress import STEP, Progress
from distlaunch.coordinator.policy.job_settings import PolicySettings
from distlaunch.core.model.duration import format_duration
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import counted, name_ranks
from distlaunch.core.protocol import agent_messages as m

if TYPE_CHECKING:
    from distlaunch.diagnosis.activity import Activity
    from distlaunch.diagnosis.hang import HangDiagnosis

SLACK_S = 0.3
"""Seconds added to --hang-timeout, because signs of life arrive a little late."""
ANSWER_S = 3.0
"""How many seconds the nodes may take to send the stacks of their workers."""
STOP_ANSWER_S = 2.0
"""The same limit after Ctrl-C, because the workers are stopped only after their stacks have
come."""
ALONE_S = 60.0
"""If other workers still run this many seconds after a worker has ended with 0, the user gets a
notice, once in a job."""
SAMPLES = 3
"""The number of samples without progress that make a hang."""
POSTPONED = 10
"""A job that works but is silent is ended after this multiple of --hang-timeout."""
END_CHECK_S = 3.0
"""If other workers still run this many seconds after a worker has ended with 0, their stacks show
whether they wait for it."""
_END_GAP_S = 1.0
"""The time between two samples of these workers."""
_END_CHECKS = 3
"""How often the workers are sampled again after ``_END_AGAIN_S`` if they did not all wait."""
_END_AGAIN_S = 10.0
_GAP_SHARE = 0.1
"""The time between two samples, as a share of the silence before the first, within ``_GAP_S``."""
_GAP_S = (0.5, 5.0)


class _Series:
    """Samples of workers of which some may hang although the job is not silent."""

    def __init__(self, kind: Literal["steps", "end"], since: float, next_at: float) -> None:
        self.kind = kind
        """``steps``: no rank has reached another step. ``end``: a worker has ended with 0."""
        self.since = since
        """When the last step was reached, or the worker ended."""
        self.next_at = next_at
        self.previous: list[m.Stack] | None = None
        self.samples = 0


class HangDetector:
    """Detects hangs, one attempt at a time, from the start of all workers until the attempt ends.

    With --hang-timeout, workers that are silent for that long are sampled. Then the attempt is
    declared hung, or the decision is postponed. Without the option, workers are sampled after
    ``hang_notice_s``, and once in a job a notice says where in their code they are.

    A rank may hang although others write or report, because these have threads of their own. If
    ranks report steps, none has reached another step for the same time, and a rank has reported
    nothing at all, workers are sampled too. Workers are also sampled soon after another worker has
    ended with 0.
    """

    def __init__(self, settings: PolicySettings, run: Attempt) -> None:
        timeout_s = settings.hang_timeout_s
        self._timeout_s = None if timeout_s is None else timeout_s + SLACK_S
        """Silence before workers are sampled to find a hang, with --hang-timeout."""
        self._notice_s = settings.hang_notice_s if timeout_s is None else None
        """Silence before workers are sampled for the notice, if there is one."""
        self._settings = settings
        self._run = run
        self._alone_notice_shown = False
        self._silence_notice_shown = False
        self._postponed_notice_shown = False
        self.ended: list[int] = []
        """The ranks of this attempt that have ended with 0, in order."""
        self.silent_s = 0.0
        """Seconds from the last sign of life to the latest sample."""
        self.lived_s = 0.0
        """How long the job had shown signs of activity before the silence."""
        self.stacks: list[m.Stack] = []
        """The stacks of the latest sample that have arrived so far."""
        self._heartbeat_ranks: set[int] = set()
        """Ranks that have sent a heartbeat in this attempt. Their output is no sign of life."""
        self._output_at: float | None = None
        """When workers in ``_heartbeat_ranks`` last wrote output since the last sign of life."""
        self.at_failure: list[m.Stack] = []
        """The stacks of the running workers when the first failure looked like a consequence."""
        self._asked_at_failure = False
        self._serial = 0
        """The serial number of the latest request for stacks, in the whole job."""
        self._started_at = 0.0
        self._sign_at: float | None = None
        self._sample_at: float | None = None
        """When the next sample is due, unless one is being taken."""
        self._previous_stacks: list[m.Stack] | None = None
        """The sample before the latest one, of the same silence."""
        self._samples = 0
        self._unanswered: set[int] = set()
        """The nodes that have not answered the latest request for stacks."""
        self._answers_due_at: float | None = None
        """When the latest request for stacks times out, while a sample is being taken."""
        self._is_before_stop = False
        """The workers are stopped when their stacks have come."""
        self._alone_notice_at: float | None = None
        """When the notice about workers that run longer than others is due."""
        self._is_stopped = False
        """The attempt ends, so nothing is measured."""
        self._series: _Series | None = None
        """The samples that are being taken of a job that is not silent."""
        self._is_for_series = False
        """The latest request for stacks belongs to ``_series``."""
        self._steps: dict[int, float] = {}
        """The last step of each rank in this attempt."""
        self._last_sign_at: dict[int, float] = {}
        """When each rank last sent a heartbeat, or wrote output if it has sent none."""
        self._advanced_at = 0.0
        """When the step of any rank last changed."""
        self._steps_from = 0.0
        """The earliest time to look for ranks that lag in steps."""
        self._end_check_at: float | None = None
        """When to look whether workers wait for one that has ended with 0."""
        self._end_checks = 0
        """How often this has been done since a worker ended with 0."""
        self._end_notice_shown = False

    def begin(self, run: Attempt) -> None:
        """Prepare for a new attempt."""
        self._run = run
        self.ended, self.stacks, self.at_failure = [], [], []
        self._asked_at_failure = False
        self._unanswered = set()
        self._heartbeat_ranks = set()
        self._steps, self._last_sign_at = {}, {}
        self.stop()
        self._is_stopped = False

    def all_started(self, now: float) -> None:
        """Start watching: all workers have been started."""
        self._started_at = now
        if self._limit_s is not None:
            self._sign_at = now
            self._reset_samples(now + self._limit_s)

    @property
    def _limit_s(self) -> float | None:
        """How long workers may be silent before they are sampled, if they ever are."""
        if self._timeout_s is not None:
            return self._timeout_s
        return self._notice_s if self._run.nodes.world_size > 1 else None

    def _reset_samples(self, check_at: float | None) -> None:
        """Drop all samples. The next one is due at ``check_at``, if set."""
        self._sample_at = (
            None if self._timeout_s is None and self._silence_notice_shown else check_at
        )
        self._previous_stacks, self._samples = None, 0

    def stop(self) -> None:
        """Stop watching, because the attempt ends."""
        self._sign_at = self._answers_due_at = self._alone_notice_at = None
        self._is_before_stop = False
        if not self._asked_at_failure:  # its answers belong to the report
            self._unanswered = set()
        self._reset_samples(None)
        self._series = self._end_check_at = None
        self._is_stopped = True

    def silent_since(self, now: float) -> float | None:
        """Return the time of the last sign of life if the silence is long enough for a notice.

        Otherwise, with --hang-timeout, and for a single worker, return None.
        """
        if self._notice_s is None or self._sign_at is None or self._run.nodes.world_size < 2:
            return None
        return self._sign_at if now >= self._sign_at + self._notice_s else None

    @property
    def is_sampling(self) -> bool:
        """Whether asked nodes that are not late or lost have not sent their stacks."""
        return self._answers_due_at is not None

    def deadline(self) -> float | None:
        """Return when ``tick`` is due."""
        times = [self._answers_due_at, self._alone_notice_at]
        if self._answers_due_at is None:
            times.append(self._sample_at)
            if self._series is not None:
                times.append(self._series.next_at)
            elif self._samples == 0:
                times += (self._end_check_at, self._steps_due_at())
        return min((time for time in times if time is not None), default=None)

    def on_worker_finished(self, rank: int, now: float) -> list[Action]:
        """Record that a worker has ended with 0, which is a sign of life. Return the actions that
        follow.

        Other workers may wait for it forever, so their stacks are soon compared.
        """
        self.ended.append(rank)
        if not self._is_stopped and not self._alone_notice_shown and self._alone_notice_at is None:
            self._alone_notice_at = now + ALONE_S
        self._steps.pop(rank, None)
        self._last_sign_at.pop(rank, None)
        if len(self._steps) < 2:
            self._drop_series("steps")
        if not self._is_stopped and self._limit_s is not None and not self._end_notice_shown:
            self._drop_series("end")
            self._end_check_at, self._end_checks = now + END_CHECK_S, 0
        return self._on_sign_of_life(now)

    def on_alive(self, message: m.Alive, now: float) -> list[Action]:
        """Record a node's report of heartbeats and output. Return the actions that follow.

        Signs of life are heartbeats, output that is held up, and output of workers that have never
        sent a heartbeat; without --hang-timeout, all output.
        """
        self._heartbeat_ranks.update(heartbeat.rank for heartbeat in message.heartbeats)
        self._note_steps(message, now)
        if (
            message.heartbeats
            or message.held
            or any(rank not in self._heartbeat_ranks for rank in message.wrote)
        ):
            return self._on_sign_of_life(now)
        if message.wrote and self._timeout_s is None:
            return self._on_sign_of_life(now)
        if message.wrote:
            self._output_at = now
        return []

    def _on_sign_of_life(self, now: float) -> list[Action]:
        self._output_at = None
        if self._sign_at is None or self._limit_s is None or self._is_before_stop:
            return []
        self._sign_at = now
        self._reset_samples(now + self._limit_s)
        if self._answers_due_at is None or self._is_for_series:
            return []
        self._answers_due_at, self._unanswered, self.stacks = None, set(), []
        if self._timeout_s is None:
            return []
        text = (
            "a sign of life came while the workers' stacks were taken: the job goes on"
            " (rarely, the signal that asks for them is what ended a wait)"
        )
        return [ShowMessage(text=text, level="warning")]

    def on_stacks(self, node: int, message: m.Stacks) -> None:
        """Record the stacks of a node. Ignore late answers to an earlier request."""
        if (message.attempt, message.serial) == (
            self._run.number,
            self._serial,
        ) and node in self._unanswered:
            self._unanswered.discard(node)
            if self._asked_at_failure:
                self.at_failure += message.stacks
            else:
                self.stacks += message.stacks

    def on_node_lost(self, node: int) -> None:
        """Record that a node is lost: its stacks will not arrive."""
        self._unanswered.discard(node)

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due."""
        actions: list[Action] = []
        if self._alone_notice_at is not None and now >= self._alone_notice_at:
            self._alone_notice_at, self._alone_notice_shown = None, True
            running = self._run.up - self._run.ended
            text = (
                f"{name_ranks(self.ended)} ended with 0 {format_duration(ALONE_S)} ago; "
                f"{counted(running, 'worker')} still running"
            )
            actions.append(ShowMessage(text=text))
        if self._answers_due_at is not None:
            if now >= self._answers_due_at:
                self._unanswered.clear()
        elif self._sample_at is not None and now >= self._sample_at and self._sign_at is not None:
            if self._previous_stacks is None and now > self._sample_at + m.LATE_S:
                # This process was suspended, so signs of life may still be unread.
                self._sign_at += now + m.LATE_S - self._sample_at
                self._sample_at = now + m.LATE_S
                return actions
            self._series = None
            actions += self._collect_stacks(self._sign_at, now, answer_s=ANSWER_S)
        elif self._series is not None or self._samples == 0:
            actions += self._tick_series(now)
        return actions

    def _collect_stacks(
        self, last: float, now: float, *, answer_s: float, of_series: bool = False
    ) -> list[Action]:
        nodes = sorted(self._run.owing)  # the others have no workers left
        self._is_for_series = of_series
        self.silent_s, self.lived_s = now - last, last - self._started_at
        self.stacks = []
        self._unanswered, self._answers_due_at = set(nodes), now + answer_s
        if not of_series:
            self._sample_at = None
        self._serial += 1
        question = m.CollectStacks(attempt=self._run.number, serial=self._serial)
        return [SendToNode(node=node, message=question) for node in nodes]

    def collect_stacks_at_failure(self) -> list[Action]:
        """Return the actions that collect the stacks of all workers after the first failure.

        The answers come while the other workers run on for ``CAUSE_S``, on a busy machine perhaps
        later; see ``awaits_stacks_at_failure``.
        """
        nodes = sorted(self._run.owing)
        self._asked_at_failure, self._unanswered = True, set(nodes)
        self._serial += 1
        question = m.CollectStacks(attempt=self._run.number, serial=self._serial)
        return [SendToNode(node=node, message=question) for node in nodes]

    def awaits_stacks_at_failure(self, now: float) -> bool:
        """Return whether stacks that were requested after the first failure may still arrive.

        A worker that is stopped before it has answered has no stack in the report, so the stop
        waits until ``STOP_ANSWER_S`` after the failure.
        """
        failed_at = self._run.first_failure
        return (
            self._asked_at_failure
            and bool(self._unanswered)
            and failed_at is not None
            and now < failed_at + STOP_ANSWER_S
        )

    def decide(self, progress: Progress, now: float) -> HangDiagnosis | list[Action]:
        """Return the hang that the samples show, or the actions if the job continues.

        There is nothing to decide while ``is_sampling``, and before.
        """
        if self._answers_due_at is None or self._unanswered:
            return []
        self._answers_due_at = None
        if self._is_before_stop:
            self._is_before_stop = False
            return self._report_places(progress)
        if self._is_for_series:
            return [] if self._series is None else self._decide_series(self._series, progress, now)
        previous, self._previous_stacks = self._previous_stacks, self.stacks
        self._samples += 1
        activity = self._activity(previous)
        timeout_s = self._settings.hang_timeout_s
        if timeout_s is None:
            return (
                self._schedule_sample(now)
                if activity is None and self._samples < SAMPLES
                else self._notice(self.diagnose(progress), activity)
            )
        if self._heartbeat_ranks or self.silent_s >= POSTPONED * timeout_s:
            return self.diagnose(progress)
        if activity is not None:
            return self._postpone(activity, timeout_s, now)
        return self._schedule_sample(now) if self._samples < SAMPLES else self.diagnose(progress)

    # --- some ranks hang, and others do not fall silent

    def _note_steps(self, message: m.Alive, now: float) -> None:
        """Record the steps of ranks. A new step, or output that is held up, ends the search for
        ranks that lag."""
        advanced = message.held
        for heartbeat in message.heartbeats:
            step = heartbeat.values.get(STEP)
            if step is not None and self._steps.get(heartbeat.rank) != step:
                self._steps[heartbeat.rank] = step
                advanced = True
            self._last_sign_at[heartbeat.rank] = now
        for rank in message.wrote:
            if rank not in self._heartbeat_ranks:
                self._last_sign_at[rank] = now
        if advanced:
            self._advanced_at, self._steps_from = now, 0.0
            self._drop_series("steps")
        if advanced or message.wrote:
            self._drop_series("end")

    def _steps_due_at(self) -> float | None:
        """Return when to look for ranks that lag in steps, if ever."""
        if self._limit_s is None or self._is_stopped or len(self._steps) < 2:
            return None
        if self._timeout_s is None and self._silence_notice_shown:
            return None
        return max(self._advanced_at + self._limit_s, self._steps_from)

    def _lags(self, rank: int, now: float) -> bool:
        """Return whether a rank has shown no sign of life for the whole time, but did before.

        Without --hang-timeout, it must also be at a lower step than another rank.
        """
        last_sign_at = self._last_sign_at.get(rank)
        if last_sign_at is None or now < last_sign_at + (self._limit_s or 0.0):
            return False
        highest = max(self._steps.values(), default=0.0)
        return self._timeout_s is not None or self._steps.get(rank, 0.0) < highest

    def _tick_series(self, now: float) -> list[Action]:
        """Return the request for the next sample of a job that is not silent, if it is due."""
        due_at = self._steps_due_at()
        if self._series is None and self._end_check_at is not None and now >= self._end_check_at:
            self._series = _Series("end", now - END_CHECK_S, now)
            self._end_check_at = None
            self._end_checks += 1
        elif self._series is None and due_at is not None and now >= due_at:
            if any(self._lags(rank, now) for rank in self._steps):
                self._series = _Series("steps", self._advanced_at, now)
            else:
                first = min(self._last_sign_at[rank] for rank in self._steps)
                self._steps_from = max(now, first) + (self._limit_s or 0.0)
        series = self._series
        if series is None or now < series.next_at:
            return []
        return self._collect_stacks(series.since, now, answer_s=ANSWER_S, of_series=True)

    def _drop_series(self, kind: Literal["steps", "end"]) -> None:
        """End the samples of this kind, if they are being taken. Late answers are ignored."""
        if self._series is None or self._series.kind != kind:
            return
        self._end_series(self._series.next_at)
        if self._is_for_series and self._answers_due_at is not None:
            self._answers_due_at, self._unanswered, self.stacks = None, set(), []

    def _end_series(self, now: float) -> list[Action]:
        series, self._series = self._series, None
        if series is not None and series.kind == "steps":
            self._steps_from = now + (self._limit_s or 0.0)
        elif self._end_checks < _END_CHECKS:
            self._end_check_at = now + _END_AGAIN_S
        return []

    def _decide_series(
        self, series: _Series, progress: Progress, now: float
    ) -> HangDiagnosis | list[Action]:
        previous, series.previous = series.previous, self.stacks
        series.samples += 1
        hang = self.diagnose(progress, by_steps=series.kind == "steps")
        if not self._is_held_up(series, previous, hang, now):
            return self._end_series(now)
        if series.samples < SAMPLES:
            shortest, longest = _GAP_S
            gap_s = min(max((self._limit_s or 0.0) * _GAP_SHARE, shortest), longest)
            series.next_at = now + (_END_GAP_S if series.kind == "end" else gap_s)
            return []
        self._series = None
        if series.kind == "end":
            self._end_notice_shown = True
            return self._end_notice(hang)
        self._steps_from = float("inf")
        if self._timeout_s is not None and self._is_sure(hang):
            return hang
        return self._notice(hang, None)

    def _is_sure(self, hang: HangDiagnosis) -> bool:
        """Return whether no rank behind may be silent for a good reason: it never sent a heartbeat,
        or it waits in the kernel, perhaps for a slow disk."""
        in_kernel = {stack.rank for stack in self.stacks if stack.state == "D"}
        return self._heartbeat_ranks.issuperset(hang.behind) and in_kernel.isdisjoint(hang.behind)

    def _is_held_up(
        self, series: _Series, previous: list[m.Stack] | None, hang: HangDiagnosis, now: float
    ) -> bool:
        """Return whether the workers still wait for the same ranks, and do nothing else between two
        samples."""
        if not hang.others_wait or self._activity(previous) is not None:
            return False
        if series.kind == "steps":
            return all(self._lags(rank, now) for rank in hang.behind)
        from distlaunch.diagnosis.activity import uses_processor

        return set(hang.behind) == set(self.ended) and not uses_processor(
            previous or [], self.stacks
        )

    @property
    def _outlook(self) -> str:
        """The sentences of a notice that say when the job ends."""
        timeout_s = self._settings.hang_timeout_s
        if timeout_s is None:
            return f"The job goes on. {Opt.HANG_TIMEOUT} ends jobs that hang"
        if self._settings.hang_action == "report":
            return "The job goes on"
        return (
            "The job goes on. The attempt ends if no worker shows a sign of life for "
            f"{format_duration(timeout_s)} ({Opt.HANG_TIMEOUT})"
        )

    def _end_notice(self, hang: HangDiagnosis) -> list[Action]:
        text = f"{hang.summary}. {self._outlook}"
        return [
            self._record(hang, None, "end"),
            WriteStacks(attempt=self._run.number, stacks=tuple(self.stacks)),
            ShowMessage(text=text, level="warning"),
        ]

    def _schedule_sample(self, now: float) -> list[Action]:
        shortest, longest = _GAP_S
        self._sample_at = now + min(max((self._limit_s or 0.0) * _GAP_SHARE, shortest), longest)
        return []

    def _activity(self, previous: list[m.Stack] | None) -> Activity | None:
        if previous is None:
            return None
        from distlaunch.diagnosis.activity import find_activity

        return find_activity(previous, self.stacks, self._settings.script_dir)

    def _postpone(self, activity: Activity, timeout_s: float, now: float) -> list[Action]:
        """Return the actions after a decision to continue, and schedule the next sample.

        After ``POSTPONED`` times the timeout, the silent job is ended.
        """
        fields = {
            "attempt": self._run.number,
            "silent_s": round(self.silent_s, 1),
            **activity.as_fields(),
        }
        actions: list[Action] = [RecordEvent(type="hang_postponed", fields=fields)]
        most_s = POSTPONED * timeout_s
        self._reset_samples(now + min(timeout_s, max(0.0, most_s - self.silent_s)))
        if not self._postponed_notice_shown:
            self._postponed_notice_shown = True
            text = (
                f"no worker has shown a sign of life for {format_duration(self.silent_s)}, but "
                f"{activity.words}. The job goes on. It ends if the silence lasts {format_duration(most_s)} "
                f"({Opt.HANG_TIMEOUT})"
            )
            actions.append(ShowMessage(text=text, level="warning"))
        return actions

    def _notice(self, hang: HangDiagnosis, activity: Activity | None) -> list[Action]:
        """Return the notice with the ranks that are behind and their places. The job continues.

        Without --hang-timeout, it is the only one of the job.
        """
        self._silence_notice_shown = True
        if self._timeout_s is None:
            self._reset_samples(None)
        working = ""
        if activity is not None:
            working = "; it works" if hang.behind == (activity.rank,) else f"; {activity.words}"
        what = (
            "no worker has reported a new step"
            if hang.record["by_steps"]
            else "no worker has written or reported anything"
        )
        text = (
            f"{what} for {format_duration(self.silent_s)}: {hang.summary}{working}. {self._outlook}"
        )
        return [
            self._record(hang, activity, "notice"),
            WriteStacks(attempt=self._run.number, stacks=tuple(self.stacks)),
            ShowMessage(text=text, level="warning"),
        ]

    def _record(self, hang: HangDiagnosis, activity: Activity | None, when: str) -> RecordEvent:
        doing = None if activity is None else activity.as_fields()
        fields = {"attempt": self._run.number, "when": when, **hang.record, "activity": doing}
        return RecordEvent(type="silence", fields=fields)

    def collect_before_stop(self, silent_since: float, now: float) -> list[Action]:
        """Return the actions that collect the stacks of all workers before they are stopped.

        ``decide`` reports where they are when all nodes have answered, or after ``STOP_ANSWER_S``.
        """
        self._is_before_stop = True
        return self._collect_stacks(silent_since, now, answer_s=STOP_ANSWER_S)

    def _report_places(self, progress: Progress) -> list[Action]:
        hang = self.diagnose(progress)
        text = (
            f"where the workers stood, {format_duration(self.silent_s)} after the last sign of "
            f"life:\n{hang.places.rstrip()}"
        )
        return [
            self._record(hang, None, "stop"),
            WriteStacks(attempt=self._run.number, stacks=tuple(self.stacks)),
            ShowMessage(text=text, level="warning"),
        ]

    def diagnose(self, progress: Progress, *, by_steps: bool = False) -> HangDiagnosis:
        """Return the diagnosis of the hang from the arrived stacks.

        ``by_steps``: the job is not silent, but no rank reaches another step.
        """
        from distlaunch.diagnosis.hang import diagnose_hang

        settings, nodes = self._settings, self._run.nodes
        return diagnose_hang(
            self.stacks,
            world_size=nodes.world_size,
            silent_s=round(self.silent_s, 1),
            by_steps=by_steps,
            output_came=self._output_at is not None
            and self._output_at > self._started_at + self.lived_s + self.silent_s / 2,
            heartbeats=progress.latest,
            ended=self.ended,
            hosts=nodes.host_of,
            script_dir=settings.script_dir,
        )
