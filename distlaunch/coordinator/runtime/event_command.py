"""Run the command of --on-event for the important events of a job.

A thread runs the command once for each of these events, in their order. Neither the main loop nor
the workers wait for it. The command runs in a session of its own, so that a terminal's Ctrl-C does
not reach it, and its process group is killed when the command or the launcher has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from distlaunch.coordinator.runtime.signal_pipe import LOOK_S
from distlaunch.core.agent.workers.log_files import open_to_append
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.run_files import BEFORE, ON_EVENT_LOG
from distlaunch.core.model.text import counted, ended_how, printable, quoted
from distlaunch.transport.child_process import KillSwitch, guarded

EVENTS = (
    "job_started",
    "failure",
    "hang",
    "node_lost",
    "restarting",
    "reforming",
    "job_ended",
)
"""Types of the events for which the command runs."""
COMMAND_S = 30.0
"""How long the command may take for one event."""
END_S = 60.0
"""How long the launcher waits after the end of the job for the events that are left."""
_NOTICE_S = 2.0
_MOST_WAITING = 1000
"""Number of events that may wait. Later ones are dropped, except ``job_ended``."""
_SWITCH_IS_STDIN = "exec 3<&0 <&1 1>&2"
"""The event comes on stdout, and stdout becomes the log file."""
_LAST_BYTES = 4096
MOST_LOG_BYTES = 8 << 20
"""Size of the log file at which a new one is begun, before the next event."""
_LOG_CHECK_S = 0.5
_KILL_S = 5.0
_OUR_VARIABLES = "DISTLAUNCH_"
_FIELD_VARIABLES = {
    "final": "DISTLAUNCH_FINAL",
    "exit_code": "DISTLAUNCH_EXIT_CODE",
    "attempt": "DISTLAUNCH_ATTEMPT",
}
"""Variables of the command, by the number or flag of the event that each one has."""


def read_command(
    command: str, environ: Mapping[str, str], *, who: str | None = None
) -> tuple[str, ...]:
    """Split the command into words as a shell does. ``who`` is the option or variable that sets it.

    Raises ConfigError if the command has no words, or if its program does not exist.
    """
    import shlex

    who = who or str(Opt.ON_EVENT)
    try:
        words = tuple(shlex.split(command))
    except ValueError as exc:
        raise ConfigError(
            f"{who} {quoted(command)}: a quotation mark is not closed",
            hint="the words are separated as in a shell",
        ) from exc
    if not words or not words[0] or "\0" in command:
        raise ConfigError(
            f"{who} {quoted(command)} names no program",
            hint=f"for example {Opt.ON_EVENT} 'python notify.py'",
        )
    if shutil.which(words[0], path=environ.get("PATH", os.defpath)) is None:
        raise ConfigError(
            f"{who}: {quoted(words[0])} is not a program that can be run",
            hint=_hint_for(command, words[0]),
        )
    return words


def _hint_for(command: str, program: str) -> str:
    if os.path.isfile(command) and command != program:
        return f"a name with blanks needs quotation marks of its own: \"'{printable(command)}'\""
    if os.path.isfile(program):
        return (
            f"chmod +x {printable(program)} makes it one"
            if not os.access(program, os.X_OK)
            else f"write ./{printable(program)}: the current directory is not in PATH"
        )
    return f"no shell runs it: {Opt.ON_EVENT} \"sh -c '...'\" uses one"


class EventCommand:
    """The command of --on-event of one job. ``observe`` never waits and never raises."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        job_id: str,
        run_dir: str,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        command_s: float = COMMAND_S,
        end_s: float = END_S,
    ) -> None:
        """``say`` shows a warning. It is called from the command's thread, too."""
        self._command_s, self._end_s = command_s, end_s
        self._words = list(words)
        self._job = {"job_id": job_id, "run_dir": run_dir}
        # Neither the job's token nor options: the command may start a job itself.
        inherited = {
            name: value for name, value in environ.items() if not name.startswith(_OUR_VARIABLES)
        }
        self._environ = {**inherited, "DISTLAUNCH_JOB_ID": job_id, "DISTLAUNCH_RUN_DIR": run_dir}
        self._log = os.path.join(run_dir, ON_EVENT_LOG)
        self._say = say
        self._changed = threading.Condition()
        self._waiting: deque[Mapping[str, object]] = deque()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._is_closed = False
        self._kill_switch: KillSwitch | None = None
        self._has_said = False

    def observe(self, record: Mapping[str, object]) -> None:
        """Queue the event for the command if its type is one of ``EVENTS``.

        If too many events wait, the event is dropped, with one warning in a job.
        """
        if record.get("type") not in EVENTS:
            return
        with self._changed:
            if self._is_closed:
                return
            is_full = len(self._waiting) >= _MOST_WAITING and record["type"] != "job_ended"
            if not is_full:
                self._waiting.append({**self._job, **record})
            is_running = self._start()
            self._changed.notify_all()
        if is_full:
            self._failed(f"more than {_MOST_WAITING} events wait for the command")
        elif not is_running:
            self._failed("no thread can be started")

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait until the command has run for all events, but at most ``END_S``.

        After that, or when ``hurried`` returns True, kill the command and drop the other events.
        """
        began = time.monotonic()
        has_noticed = False
        with self._changed:
            while self._waiting or self._is_busy:
                waited_s = time.monotonic() - began
                if hurried() or waited_s >= self._end_s or self._thread is None:
                    break
                if waited_s >= _NOTICE_S and not has_noticed:
                    has_noticed = True
                    self._say(
                        f"the command of {Opt.ON_EVENT} has up to {self._end_s:g} s for the last events; a "
                        "signal such as Ctrl-C ends it at once"
                    )
                self._changed.wait(LOOK_S)
            left = len(self._waiting) + self._is_busy
            self._is_closed = True
            self._waiting.clear()
            kill_switch, thread = self._kill_switch, self._thread
            self._changed.notify_all()
        if kill_switch is not None:
            kill_switch.close()
        if thread is not None:
            thread.join(timeout=_NOTICE_S)
        if left:
            self._say(f"{counted(left, 'event')} did not get to the command of {Opt.ON_EVENT}")

    def _start(self) -> bool:
        """Start the thread if it does not run. Return whether it runs."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="dl-on-event", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                while not self._waiting:
                    if self._is_closed:
                        return
                    self._changed.wait()
                record = self._waiting.popleft()
                self._is_busy = True
            try:
                problem = self._run(record)
            except OSError as exc:
                problem = os.strerror(exc.errno or 0)
            if problem:
                self._failed(f"{problem} (event {record['type']})")

    def _run(self, record: Mapping[str, object]) -> str:
        """Run the command for one event. Return what went wrong, or "".

        Raises OSError if the command cannot be started.
        """
        kill_switch = KillSwitch()
        with self._changed:
            if self._is_closed:
                return ""
            self._kill_switch = kill_switch
        try:
            return self._run_guarded(record, kill_switch)
        finally:
            kill_switch.close()
            with self._changed:
                self._kill_switch = None

    def _run_guarded(self, record: Mapping[str, object], kill_switch: KillSwitch) -> str:
        switch = event = log = -1
        try:
            switch = kill_switch.attach()
            event = os.memfd_create("event")
            os.write(event, json.dumps(record).encode("ascii") + b"\n")
            os.lseek(event, 0, os.SEEK_SET)
            log, began = self._open_log()
            environ = {**self._environ, "DISTLAUNCH_EVENT": str(record["type"])}
            environ |= {
                variable: str(int(value))
                for field, variable in _FIELD_VARIABLES.items()
                if isinstance(value := record.get(field), int)
            }
            process = subprocess.Popen(
                guarded(self._words, _SWITCH_IS_STDIN),
                stdin=switch,
                stdout=event,
                stderr=log,
                env=environ,
                start_new_session=True,
            )
        finally:
            for descriptor in (switch, event, log):
                if descriptor >= 0:
                    os.close(descriptor)
        code = self._wait_for(process)
        if code is None:
            kill_switch.close()
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)
            return f"it did not end in {self._command_s:g} s and was killed"
        if code == 0 or self._is_closed:
            return ""
        last = self._last_line(began)
        return f"it {ended_how(code)}" + (f"; it wrote: {quoted(last)}" if last else "")

    def _open_log(self) -> tuple[int, int]:
        """Return a descriptor for the command's output, and the size of the log file."""
        try:
            log = open_to_append(self._log)
            if os.fstat(log).st_size >= MOST_LOG_BYTES:
                os.close(log)
                os.replace(self._log, self._log + BEFORE)
                log = open_to_append(self._log)
        except OSError:  # the disk is full, or somebody has removed the run directory
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 0
        return log, os.fstat(log).st_size

    def _wait_for(self, process: subprocess.Popen[bytes]) -> int | None:
        """Return how the command ended; None if it takes too long. Meanwhile, drop output beyond
        twice the limit."""
        until = time.monotonic() + self._command_s
        while (left_s := until - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(min(left_s, _LOG_CHECK_S))
            with suppress(OSError):
                if os.stat(self._log).st_size > 2 * MOST_LOG_BYTES:
                    os.truncate(self._log, 2 * MOST_LOG_BYTES)
        return None

    def _last_line(self, began: int) -> str:
        """Return the last line that the command wrote. ``began``: the size of the log before."""
        with suppress(OSError), open(self._log, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(min(began, size), size - _LAST_BYTES))
            words = file.read(_LAST_BYTES).decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(words) if line.strip()), "")
        return ""

    def _failed(self, problem: str) -> None:
        """Show a warning for the first failure of the job; for others, do nothing."""
        with self._changed:
            if self._has_said or self._is_closed:
                return
            self._has_said = True
        self._say(
            f"the command of {Opt.ON_EVENT} failed: {problem}; the job goes on, and further failures "
            f"are not shown. Its output: {printable(self._log)}"
        )
