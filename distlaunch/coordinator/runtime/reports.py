"""Report failed and hung attempts and errors of the job.

They appear on the screen, in ``events.jsonl``, ``report.txt`` and ``report.json``, and in the
launcher's error file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.policy.restarts import Final, RestartDecision, text_of
from distlaunch.coordinator.runtime.error_file import ErrorFile
from distlaunch.coordinator.runtime.records import DiskWork, EventLog
from distlaunch.coordinator.runtime.run_directory import RunDir
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.agent.workers.log_files import open_to_append
from distlaunch.core.errors import EXIT_HANG
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import STDERR, STDOUT, Layout
from distlaunch.core.model.text import name_ranks, printable
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.private_files import open_private
from distlaunch.core.probe.python_modules import environment_has
from distlaunch.diagnosis.model import Diagnosis
from distlaunch.planning.build_plan import other_environment

REPORT_SCHEMA = 1
"""Raised when a field of ``report.json`` changes its meaning or goes away."""
_NOT_APPLICABLE: Mapping[str, object] = dict.fromkeys(
    ("attempt", "restarts", "world_size", "final_reason", "diagnosis", "hang", "error")
)
"""Every report has all fields. Those of other kinds are null."""


class Reporter:
    """Reports the attempts of one job."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        max_restarts: int,
        run_dir: RunDir,
        sink: Sink,
        events: EventLog,
        disk_work: DiskWork,
        started_s: float,
        launchers: bool = False,
        error_file: ErrorFile | None = None,
    ) -> None:
        """``launchers``: the launchers of other nodes write their workers' logs, perhaps on other
        disks."""
        self.plan = plan
        """The plan of the latest attempt."""
        self._max_restarts = max_restarts
        self._run_dir = run_dir
        self._sink = sink
        self._events = events
        self._disk_work = disk_work
        self._started_s = started_s
        self._launchers = launchers
        self._error_file = error_file or ErrorFile(None)
        self._error: a.JobError | None = None
        self._data: dict[str, object] | None = None
        """What ``report.json`` says of the failure. None if nothing has failed."""
        self.summary = ""
        """Why the job has failed, in one sentence; empty if it has not failed."""

    def failed(self, action: a.ReportFailure, *, terminal: bool) -> None:
        """Report an attempt in which a worker failed: in full if the job ends with it, else in one
        line.

        ``terminal``: the worker had a pseudo-terminal, so its stderr is in the same stream as its
        stdout.
        """
        from distlaunch.diagnosis.report import diagnosis_record, one_line, render_report

        plan = self.plan
        cause = action.diagnosis.cause
        of_stdout = terminal or cause.stream == "stdout"
        path = plan.layout.log_path(
            plan.run_dir, action.attempt, cause.ranks[0], STDOUT if of_stdout else STDERR
        )
        wrote = (
            self._disk_work.ask(lambda: os.path.exists(path)) is not False
        )  # a log is created with its first byte
        diagnosis = replace(
            action.diagnosis, cause=replace(cause, log_path=path if wrote else None)
        )
        fields = {
            "attempt": action.attempt,
            "final": action.final,
            "diagnosis": diagnosis_record(diagnosis),
        }
        if isinstance(action.decision, Final):
            fields["reason"] = action.decision.reason.name.lower()
        if action.while_stopping:
            fields["while_stopping"] = True
        self._events.write("failure", fields)
        if not action.final:
            self._warn_about_restart(
                action,
                f"failed: {one_line(self._shown(diagnosis), many_hosts=len(plan.nodes) > 1)}",
            )
            return
        text = render_report(
            self._with_environment(self._shown(diagnosis)),
            job_id=plan.name,
            world_size=plan.shown_size,
            attempt=action.attempt,
            restarts=action.restarts,
            max_restarts=self._max_restarts,
            elapsed_s=time.monotonic() - self._started_s,
            run_dir=plan.layout.attempt_dir(plan.run_dir, action.attempt),
            many_hosts=len(plan.nodes) > 1,
            filed=None if wrote else self._filed_elsewhere(path, cause.ranks[0]),
            while_stopping=action.while_stopping,
            terminal=terminal,
        )
        recorded = (
            plan.layout.error_files(plan.run_dir, action.attempt)(cause.ranks[0])
            if cause.ranks
            else None
        )
        if cause.awaited:  # the exception is that of a rank that waited
            what = one_line(self._shown(diagnosis))
        elif cause.exception_type:
            what = f"{cause.exception_type}: {cause.message}"
        else:
            what = cause.message or cause.summary
        self.summary = what
        record = {"diagnosis": diagnosis_record(diagnosis)}
        self._show(text, action)
        self._keep_data("failure", text, action, record)
        self._disk_work.do(
            lambda: self._error_file.write(what, text, diagnosis.exit_code, recorded=recorded)
        )

    def failed_briefly(self, action: a.ReportFailure) -> None:
        """Report an attempt in which a worker failed, in few lines, after a fault in ``failed``."""
        cause, plan = action.diagnosis.cause, self.plan
        ranks = name_ranks(plan.first_shown + rank for rank in cause.ranks)
        what = f"{ranks} failed: {cause.summary}" if cause.ranks else cause.summary
        if not action.final:
            self._warn_about_restart(action, f"failed: {what}")
            return
        logs = plan.layout.attempt_dir(plan.run_dir, action.attempt)
        if cause.ranks:
            logs = plan.layout.log_path(plan.run_dir, action.attempt, cause.ranks[0])
        self._report_briefly("failure", what, f"{what}\n  log: {printable(logs)}", action)

    def hung_briefly(self, action: a.ReportHang) -> None:
        """Report an attempt that hung, in few lines, after a fault in ``hung``."""
        if action.final:
            text = action.diagnosis.text
            self._report_briefly("hang", action.diagnosis.headline, text, action)

    def _report_briefly(
        self, kind: str, what: str, text: str, action: a.ReportFailure | a.ReportHang
    ) -> None:
        code = EXIT_HANG
        if isinstance(action, a.ReportFailure):
            code = action.diagnosis.exit_code
        self.summary = printable(what)
        self._show(text, action)
        self._keep_data(kind, text, action, {})
        self._disk_work.do(lambda: self._error_file.write(self.summary, text, code))

    def _shown(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis with the rank numbers that the user sees."""
        first, cause = self.plan.first_shown, diagnosis.cause
        if not first:
            return diagnosis
        return replace(
            diagnosis, cause=replace(cause, ranks=tuple(first + rank for rank in cause.ranks))
        )

    def _with_environment(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis, with a longer hint if a module is missing.

        If the workers do not use the active environment, the hint says whether that environment has
        the module.
        """
        plan = self.plan
        prefix = other_environment(plan.base_env, plan.argv[0])
        of_python = os.path.basename(plan.argv[0]).startswith("python")
        if (
            diagnosis.missing_module is None
            or diagnosis.hint is None
            or prefix is None
            or not of_python
        ):
            return diagnosis
        top = diagnosis.missing_module.partition(".")[0]
        has = self._disk_work.ask(lambda: environment_has(top, prefix))
        if has is None:
            return diagnosis
        python = os.path.join(prefix, "bin", "python")
        said = f"has {top}: {Opt.PYTHON}={python}" if has else f"({prefix}) has no {top} either"
        return replace(diagnosis, hint=f"{diagnosis.hint}. The active environment {said}")

    def _filed_elsewhere(self, path: str, rank: int) -> str | None:
        """Return where a log is that another launcher writes; None if this launcher writes it."""
        plan = self.plan
        node_rank = plan.workers[rank].node_rank
        if not self._launchers or node_rank == 0:
            return None
        within = os.path.relpath(path, os.path.dirname(plan.run_dir or ""))
        return f"{within} in the log directory of {plan.nodes[node_rank].host}"

    def hung(self, action: a.ReportHang) -> None:
        """Report an attempt that hung: in full if the job ends with it, else in one line.

        The policy has written its ``hang`` event before.
        """
        if not action.final:
            self._warn_about_restart(action, "hung")
            return
        from distlaunch.diagnosis.report import job_line, killed_lines

        lines = [
            action.diagnosis.text.rstrip(),
            *(f"  {line}" for line in (*action.written, *action.dead_threads)),
            *killed_lines(action.killed, action.after_grace, action.leftovers),
            f"  stacks and logs: {self.plan.layout.attempt_dir(self.plan.run_dir, action.attempt)}",
            job_line(
                job_id=self.plan.name,
                attempt=action.attempt,
                restarts=action.restarts,
                max_restarts=self._max_restarts,
                elapsed_s=time.monotonic() - self._started_s,
            ),
        ]
        text = "\n".join(lines)
        self.summary = action.diagnosis.headline
        self._show(text, action)
        self._keep_data("hang", text, action, {"hang": dict(action.diagnosis.record)})
        self._disk_work.do(lambda: self._error_file.write(self.summary, text, EXIT_HANG))

    def keep_stacks(self, action: a.WriteStacks) -> None:
        """Write the stacks of each worker to a file. If the disk is full, files are missing."""
        layout, run_dir = self.plan.layout, self.plan.run_dir
        self._disk_work.do(lambda: _write_stacks(action, layout, run_dir))

    def keep_error(self, message: WorkerExit) -> None:
        """Write the error file of a worker if its exit has the content and the file does not
        exist."""
        if message.error_file is None:
            return
        path = self.plan.layout.error_files(self.plan.run_dir, message.attempt)(message.rank)
        text = message.error_file
        self._disk_work.do(lambda: _keep_error(path, text))

    def _warn_about_restart(self, action: a.ReportFailure | a.ReportHang, what: str) -> None:
        text = (
            f"attempt {action.attempt} {what}; restart {action.restarts + 1} of "
            f"{self._max_restarts}"
        )
        self._sink.say(text, level="warning")

    def keep_job_error(self, error: a.JobError) -> None:
        """Write to ``report.txt`` why the job ends, although no worker has failed. ``ended`` writes
        the rest."""
        self._error, self.summary = error, error.message
        self._data = {
            "kind": "error",
            "error": {"message": error.message, "hints": list(error.hints)},
            "text": error.text.rstrip(),
        }
        self._disk_work.do(
            lambda: self._run_dir.write_report(f"distlaunch: {error.text.rstrip()}\n")
        )

    def ended(self, exit_code: int) -> None:
        """Write ``report.json`` if the job failed, and the launcher's error file if no worker
        did."""
        error = self._error
        if self._data is not None and exit_code:
            elapsed_s = round(time.monotonic() - self._started_s, 3)
            common = {"job_id": self.plan.job_id, "exit_code": exit_code, "elapsed_s": elapsed_s}
            record = {"schema": REPORT_SCHEMA, **common, **_NOT_APPLICABLE, **self._data}
            self._disk_work.do(lambda: self._run_dir.write_report_data(record))
        if error is not None and exit_code:
            self._disk_work.do(lambda: self._error_file.write(error.message, error.text, exit_code))

    def _keep_data(
        self,
        kind: str,
        text: str,
        action: a.ReportFailure | a.ReportHang,
        record: Mapping[str, object],
    ) -> None:
        """Keep what ``report.json`` says of an attempt."""
        self._data = {
            "kind": kind,
            "attempt": action.attempt,
            "restarts": action.restarts,
            "world_size": self.plan.shown_size,
            "final_reason": _final_reason(action.decision),
            "text": text.rstrip(),
            **record,
        }

    def _show(self, text: str, action: a.ReportFailure | a.ReportHang) -> None:
        of_stop = isinstance(action, a.ReportFailure) and action.while_stopping
        if isinstance(action.decision, Final) and not of_stop:
            why = text_of(action.decision)
            text = f"{text.rstrip()}\n  {why}\n" if why else text
        self._disk_work.do(lambda: self._run_dir.write_report(text.rstrip() + "\n"))
        self._sink.say(text.rstrip(), level="error")


def _final_reason(decision: RestartDecision) -> str | None:
    return decision.reason.name.lower() if isinstance(decision, Final) else None


def _write_stacks(action: a.WriteStacks, layout: Layout, run_dir: str) -> None:
    for stack in action.stacks:
        state = f"state {stack.state}" if stack.state else "gone"
        head = (
            f"# {time.strftime('%Y-%m-%d %H:%M:%S')}: rank {stack.rank}, pid {stack.pid}, "
            f"{printable(state)}\n"
        )
        text = stack.text if stack.text.strip() else "# no stack could be had\n"
        with suppress(OSError):
            descriptor = open_to_append(layout.stacks_path(run_dir, action.attempt, stack.rank))
            try:
                os.write(
                    descriptor, (head + text.rstrip() + "\n\n").encode("utf-8", "backslashreplace")
                )
            finally:
                os.close(descriptor)


def _keep_error(path: str, text: str) -> None:
    """Write a worker's error file, unless it exists or cannot be written."""
    with suppress(OSError):  # it exists already, or the disk is full
        descriptor = open_private(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        )
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
