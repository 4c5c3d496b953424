"""Child processes whose stdin and stdout are a byte stream: ssh, a ProxyCommand, a local agent."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from distlaunch.core.model.text import printable
from distlaunch.transport.bootstrap import FLAGS, STUB, clause_of_last_lines, start_agent
from distlaunch.transport.cleanup import run_in_background, wait_budget
from distlaunch.transport.connect_errors import ConnectStepError
from distlaunch.transport.connection import (
    ConnectError,
    Connection,
    ConnectionEnd,
    EndKind,
    Target,
    end_of_program,
)
from distlaunch.transport.open_files import with_original_limit

_CHUNK = 1 << 16
_STDERR_TAIL = 16 << 10
_REAP_S = 0.5
"""How long to wait for the end of a killed process. Later, the next cleanup reaps it."""
_GUARD = '; ({ read -r _ <&3; kill -9 0; } </dev/null >/dev/null 2>&1 &); exec 3<&- "$@"'
"""Starts a process in the program's group that waits for the end of the kill switch's pipe, then
kills the group."""
_SWITCH_IS_STDIN = "exec 3<&0 <&1"
_unreaped: list[subprocess.Popen[bytes]] = []
_reaping = threading.Lock()
_READ_BYTES = 1 << 18
_END_S = 2.0


def open_local_agent(
    target: Target, within_s: float, *, code: bytes, environ: Mapping[str, str]
) -> Connection:
    """Start an agent on this machine within ``within_s`` seconds, and return the connection to it.

    The agent stops its workers and exits when the connection is closed. ``code`` is the agent's
    zip. Raises ConnectError if it does not start.
    """
    until = time.monotonic() + within_s
    nonce = os.urandom(16).hex()
    python = sys.executable or "python3"
    try:
        connection = _start_local([python, *FLAGS, "-c", STUB, str(len(code)), nonce], environ)
        start_agent(connection, code, nonce, until=until, where=target.host)
    except ConnectStepError as error:
        raise ConnectError(error.failure(target.host)) from error
    connection.limit_waits()
    return connection


def _start_local(argv: list[str], environ: Mapping[str, str]) -> ProcessConnection:
    try:
        return ProcessConnection(with_original_limit(argv), environ=environ, kill_switch=None)
    except OSError as exc:
        raise ConnectStepError(
            "python", f"{printable(argv[0])} cannot be run: {exc.strerror}"
        ) from exc


class ProcessConnection:
    """A connection to the stdin and stdout of a program, which the constructor starts.

    With a kill switch, ``close`` kills the program; this is for programs that only carry bytes
    (``ssh``). An agent exits when its stream is closed.
    """

    def __init__(
        self, argv: Sequence[str], *, environ: Mapping[str, str], kill_switch: KillSwitch | None
    ) -> None:
        self._child = Child(argv, environ=environ, kill_switch=kill_switch)
        self._socket = self._child.stream
        self._is_polled = False
        self._pending = b""
        self._always = -1
        self._ended = False
        self._closed = False
        self._closed_here = False
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._epoll.register(self._child.stderr_fd, select.EPOLLIN)  # until it is closed

    def limit_waits(self) -> None:
        """Let ``end`` wait no longer than the main loop's budget from now on."""
        self._is_polled = True

    def fileno(self) -> int:
        """Return a descriptor that is ready for stdout and for stderr, so that neither pipe fills
        up."""
        return self._epoll.fileno()

    def receive(self) -> bytes | None:
        """Return the bytes that have arrived, perhaps none; None after the end."""
        with self._lock:
            return None if self._closed else self._receive_bytes()

    def _receive_bytes(self) -> bytes | None:
        self._child.read_stderr()
        if self._pending:
            data, self._pending = self._pending, b""
            self._epoll.unregister(self._always)
            os.close(self._always)
            self._always = -1
            return data
        if self._ended:
            return None
        try:
            data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self._ended = True
            return None
        return data

    def unread(self, data: bytes) -> None:
        """Put bytes back, for the next ``receive``. ``fileno`` becomes readable."""
        self._pending = data
        self._always = os.eventfd(1, os.EFD_CLOEXEC)
        self._epoll.register(self._always, select.EPOLLIN)

    def send(self, data: bytes) -> None:
        """Send all bytes. Blocks while the program reads slowly. Raises OSError if the connection
        is closed."""
        self._socket.sendall(data)

    def stderr_tail(self) -> bytes:
        """Return the last bytes of stderr that have arrived."""
        with self._lock:
            return self._child.read_stderr()

    def returncode(self, within_s: float = 0.0) -> int | None:
        """Return the program's exit code (negative for a signal); None if it has not exited within
        ``within_s`` seconds."""
        return self._child.returncode(within_s)

    def close(self) -> None:
        """Close the stream without waiting, and kill a program with a kill switch. Can be called
        again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._child.close()
        self._closed_here = not self._ended
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a sender
        except OSError:
            pass  # it had ended
        self._epoll.close()
        self._socket.close()
        if self._always >= 0:
            os.close(self._always)

    def clear_stderr(self) -> None:
        """Drop the stderr up to now."""
        with self._lock:
            self._child.clear_stderr()

    def end(self) -> ConnectionEnd:
        """Return how the program ended, with its last line of stderr. Called after the end.

        May wait for the program, within a limit.
        """
        if self._closed_here:
            return ConnectionEnd(kind=EndKind.CLOSED_HERE, last_words=self._last_line())
        code = self.returncode()
        if code is None and self._ended:
            code = (
                wait_budget.spend(self.returncode) if self._is_polled else self.returncode(_END_S)
            )
        return end_of_program(code, self._last_line())

    def _last_line(self) -> str:
        return clause_of_last_lines(self.stderr_tail(), 1)


class KillSwitch:
    """Kills a set of process groups when it is closed or when the launcher ends in any way.

    The switch is a pipe. A guard process in each group waits for its end and then kills the group:
    a program that waits for the network does not notice that its stream has ended. PR_SET_PDEATHSIG
    is not sufficient: the kernel sends that signal when the thread that forked the child ends, and
    neither to grandchildren nor to processes of another user.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: tuple[int, int] | None = None
        self._attached = 0
        self.is_closed = False

    def attach(self) -> int:
        """Return a descriptor for a guard to read, which the caller closes. Raises OSError after
        ``close``."""
        with self._lock:
            if self.is_closed:
                raise OSError("the job is over")
            if self._ends is None:
                self._ends = os.pipe()
            self._attached += 1
            return os.dup(self._ends[0])

    def kill(self, group: int) -> None:
        """Kill one process group with a guard, unless all its processes have ended or the switch is
        closed."""
        with self._lock:
            # A guard of an open kill switch runs, so that the group id cannot be reused.
            if not self.is_closed:
                with suppress(
                    ProcessLookupError, PermissionError
                ):  # PermissionError: sudo, which exits when its stream ends
                    os.killpg(group, signal.SIGKILL)

    def detach(self) -> None:
        """End the use of one descriptor. After the last one, the pipe is closed, so that guards
        that are left kill their groups."""
        with self._lock:
            self._attached -= 1
            if not self._attached:
                self._close_pipe()

    def close(self) -> None:
        """Kill all groups, without waiting for their end. ``attach`` fails from now on."""
        with self._lock:
            self.is_closed = True
            self._close_pipe()

    def _close_pipe(self) -> None:
        ends, self._ends = self._ends, None
        for descriptor in ends or ():
            os.close(descriptor)


class Child:
    """A program in its own session, so that a terminal's Ctrl-C does not reach it.

    Only ``returncode`` and ``stop`` wait. A program without ``kill_switch`` must exit when its
    stream ends; only ``stop`` kills it.
    """

    def __init__(
        self, argv: Sequence[str], *, environ: Mapping[str, str], kill_switch: KillSwitch | None
    ) -> None:
        """Start the program. Raises OSError."""
        reap()
        self._kill_switch = kill_switch
        self._stderr = bytearray()
        self._closed = False
        command = list(argv)
        if kill_switch is not None:
            _check_program(command[0], environ)
            command = guarded(command, _SWITCH_IS_STDIN)
        guard_end = None if kill_switch is None else kill_switch.attach()
        try:
            self.stream, self._stderr_fd, self._process = _start_process(
                command, environ, guard_end
            )
        except BaseException:
            if kill_switch is not None:
                kill_switch.detach()
            raise
        finally:
            if guard_end is not None:
                os.close(guard_end)

    @property
    def stderr_fd(self) -> int:
        """Descriptor that is readable if stderr has data or has ended; -1 after the end."""
        return self._stderr_fd

    def read_stderr(self) -> bytes:
        """Read stderr without waiting. Return the last bytes read so far."""
        while self._stderr_fd >= 0:
            try:
                data = os.read(self._stderr_fd, _CHUNK)
            except BlockingIOError:
                break
            self._stderr += data
            del self._stderr[:-_STDERR_TAIL]
            if not data:
                self._close_stderr()
        return bytes(self._stderr)

    def clear_stderr(self) -> None:
        """Drop the stderr up to now."""
        self.read_stderr()
        self._stderr.clear()

    def returncode(self, within_s: float = 0.0) -> int | None:
        """Return the exit code; None if the program has not exited within ``within_s`` seconds."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, within_s: float) -> None:
        """Send TERM, and KILL if the program has not exited after ``within_s`` seconds."""
        self._process.terminate()
        if self.returncode(within_s) is None:
            self._process.kill()

    def close(self) -> None:
        """Close the stream, and kill the group of a program with a kill switch.

        ``read_stderr`` can still be called. Can be called again.
        """
        if self._closed:
            return
        self._closed = True
        self.read_stderr()
        if self._kill_switch is not None:
            self._kill_switch.kill(self._process.pid)
            self._kill_switch.detach()
        self._close_stderr()
        if self._process.poll() is not None:
            return
        if self._kill_switch is None:
            self._reap_later()
        else:
            run_in_background(self._await_end)

    def _await_end(self) -> None:
        if self.returncode(_REAP_S) is None:
            self._reap_later()

    def _reap_later(self) -> None:
        with _reaping:
            _unreaped.append(self._process)

    def _close_stderr(self) -> None:
        stderr_fd, self._stderr_fd = self._stderr_fd, -1
        if stderr_fd >= 0:
            os.close(stderr_fd)


def _start_process(
    argv: Sequence[str], environ: Mapping[str, str], stdin: int | None
) -> tuple[socket.socket, int, subprocess.Popen[bytes]]:
    """Return our end of the stream, our end of stderr, and the process. The stream is also its
    stdin, unless ``stdin`` is set."""
    ours, theirs = socket.socketpair()
    our_stderr, their_stderr = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(their_stderr, True)
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=theirs.fileno() if stdin is None else stdin,
            stdout=theirs.fileno(),
            stderr=their_stderr,
            env=dict(environ),
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        os.close(our_stderr)
        raise
    finally:
        theirs.close()
        os.close(their_stderr)
    return ours, our_stderr, process


class BackgroundCommand:
    """A command that runs in the background until its output is needed. It never outlives the
    launcher."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the command. Raises OSError."""
        self._child = Child(argv, environ=environ, kill_switch=KillSwitch())
        self._child.stream.shutdown(socket.SHUT_WR)

    def result(self, *, within_s: float) -> tuple[int, bytes, bytes]:
        """Return exit code, stdout, and the end of stderr. Called once.

        After ``within_s`` seconds, kill the command and raise TimeoutError. Raises OSError if its
        output cannot be read.
        """
        deadline = time.monotonic() + within_s
        child = self._child
        try:
            answer = bytearray()
            while True:
                child.stream.settimeout(max(0.001, deadline - time.monotonic()))
                data = child.stream.recv(_CHUNK)
                child.read_stderr()
                if not data:
                    break
                answer += data
            code = child.returncode(max(0.0, deadline - time.monotonic()))
            if code is None:
                raise TimeoutError
            return code, bytes(answer), child.read_stderr()
        finally:
            child.close()
            child.stream.close()


def run_command(
    argv: Sequence[str], environ: Mapping[str, str], *, within_s: float
) -> tuple[int, bytes, bytes]:
    """Run a command and return its exit code, stdout, and the end of stderr.

    It outlives neither the call nor the launcher. Raises OSError if it cannot be started, and
    TimeoutError after ``within_s`` seconds.
    """
    return BackgroundCommand(argv, environ).result(within_s=within_s)


def guarded(argv: Sequence[str], to_three: str) -> list[str]:
    """Return a command line that starts a guard beside the program.

    ``to_three`` is shell code that makes the kill switch descriptor 3.
    """
    return ["/bin/sh", "-c", to_three + _GUARD, "sh", *argv]


def reap() -> None:
    """Reap processes that exited after their connections were closed, as agents do."""
    with _reaping:
        _unreaped[:] = [process for process in _unreaped if process.poll() is None]


def _check_program(program: str, environ: Mapping[str, str]) -> None:
    """Raise OSError if a program does not exist or cannot be run; otherwise only the shell's stderr
    would say so."""
    if shutil.which(program, path=environ.get("PATH", os.defpath)) is None:
        if os.path.exists(program) and "/" in program:
            raise PermissionError(13, os.strerror(13), program)
        raise FileNotFoundError(2, os.strerror(2), program)
