"""A sandbox on this machine for a real system: a directory, pids, mounts and cgroups of its own.
Nothing of it stays.

Three processes take part. The *user* (a test, `up`, `run`) starts the *keeper* (`scripts/testbed
KIND hold`) with a pipe as its stdin. The keeper makes the directory and forks the *init* of a new
pid namespace, which starts the system. When the pipe closes before ``keep`` has come through it, or
on TERM, the keeper takes everything down. The kernel kills a pid namespace whole when its init is
killed, and the init when the keeper is: no process of the system can escape that. Mounts end with
the namespaces. If the keeper was killed, its directory and cgroups stay until ``take_down`` finds
them. A lock shows whether a keeper lives: no recycled pid can hold it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from testbedlib import kernel

KEEP = b"keep\n"
_RECORD = "testbed.json"
_LOCK = "lock"
_STAYS = "stays"
_ERRORS = "init.stderr"
_END_S = 20.0
_YOUNG_S = 60.0
"""A directory without a lock may belong to a keeper that has just begun."""
_GONE = (errno.ENOENT, errno.ENODEV)
"""A cgroup has been removed before its file was opened, or after that."""


class TestbedError(Exception):
    """The test bed cannot be brought up or taken down here; the message says why."""


BringUp = Callable[[str], Mapping[str, str]]
"""Starts a system as pid 1 of its namespace, given the directory; returns the environment for its
users."""
Enter = Callable[[str, int], Sequence[str]]
"""Return the command that runs another one inside, given the directory and the pid of the system's
first process."""


# --- the keeper ------------------------------------------------------------------------------------------------------


def enter_words(directory: str, init: int) -> list[str]:
    """Return the command that runs another one beside the first process; it ends with the sandbox at
    the latest."""
    return ["nsenter", f"--target={init}", "--pid", "--mount", "--"]


def keep(
    kind: str, bring_up: BringUp, hierarchies: Sequence[str] = (), enter: Enter = enter_words
) -> int:
    """Run as the keeper: start a system, report it in one line of JSON on stdout, and take it down
    on request.

    ``hierarchies`` are cgroup v1 hierarchies to be mounted as ``DIR/cgroup/NAME``, with a group of
    the sandbox's own as their root. Returns an exit code. Raises TestbedError when the system does
    not come up; nothing is left then.
    """
    if os.geteuid() != 0:
        raise TestbedError(
            "needs root: for namespaces, device nodes, and daemons that start other users' programs"
        )
    wake, asleep = os.pipe()
    os.set_blocking(asleep, False)
    signal.set_wakeup_fd(asleep)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    directory = tempfile.mkdtemp(prefix=f"distlaunch-{kind}-")
    init = None
    try:
        _lock(directory)
        os.chmod(directory, 0o755)
        kernel.private_mounts()
        for name in hierarchies:
            os.makedirs(f"{directory}/cgroup/{name}")
            _mount_cgroup(f"{directory}/cgroup/{name}", name)
            os.mkdir(_group(directory, name))
        kernel.unshare(kernel.CLONE_NEWPID)
        init, answers = _fork_init(directory, bring_up, hierarchies)
        _write_record(directory, init)
        answer = _answer(directory, answers, wake)
        if "environment" not in answer:
            raise TestbedError(str(answer["error"]))
        _write_record(directory, init, answer["environment"])
        print(
            json.dumps({"directory": directory, "enter": list(enter(directory, init)), **answer}),
            flush=True,
        )
        return _until_told(directory, wake, init)
    except OSError as error:
        raise TestbedError(f"this machine does not allow a sandbox: {error}") from error
    finally:
        _kill_init(directory, init, hierarchies)
        _remove(directory, hierarchies)


def _lock(directory: str) -> None:
    """Lock a file for the life of this process. It is close-on-exec, and the init closes its
    copy."""
    fd = os.open(f"{directory}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _write_record(directory: str, init: int, environment: object = None) -> None:
    record = {"keeper": _named(os.getpid()), "init": _named(init), "environment": environment}
    with open(f"{directory}/{_RECORD}.new", "w", encoding="ascii") as file:
        json.dump(record, file)
    os.rename(f"{directory}/{_RECORD}.new", f"{directory}/{_RECORD}")


def _named(pid: int) -> tuple[int, int | None]:
    return pid, kernel.started_at(pid)


def _fork_init(directory: str, bring_up: BringUp, hierarchies: Sequence[str]) -> tuple[int, int]:
    answers, tell = os.pipe()
    life, held = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        os.close(life)
        return (
            pid,
            answers,
        )  # `held` stays open in the keeper: its end is how the init can tell that we are gone
    status = 1
    try:
        kernel.die_with_parent()
        os.close(held)
        if select.select([life], [], [], 0)[0]:
            os._exit(1)  # the keeper ended before we asked to die with it
        os.closerange(3, tell)
        os.closerange(tell + 1, life + 1)
        _enter(directory, hierarchies)
        _be_init(tell, lambda: bring_up(directory))
        status = 0
    except BaseException:  # noqa: BLE001 - a forked copy of the keeper must never run the keeper's own clean-up
        traceback.print_exc()
    finally:
        os._exit(status)


def _enter(directory: str, hierarchies: Sequence[str]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(os.open(f"{directory}/{_ERRORS}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    os.dup2(2, 1)
    kernel.private_mounts()
    for name in hierarchies:
        with open(f"{_group(directory, name)}/cgroup.procs", "w", encoding="ascii") as file:
            file.write("0")
        kernel.unmount(f"{directory}/cgroup/{name}")
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    if hierarchies:
        kernel.unshare(kernel.CLONE_NEWCGROUP)
    for name in hierarchies:
        _mount_cgroup(f"{directory}/cgroup/{name}", name)


def _be_init(tell: int, bring_up: Callable[[], Mapping[str, str]]) -> None:
    try:
        answer: dict[str, object] = {"environment": dict(bring_up())}
    except TestbedError as error:
        answer = {"error": str(error)}
    os.write(tell, json.dumps(answer).encode())
    os.close(tell)
    if "error" in answer:
        return
    while True:
        os.wait()  # daemons never end; orphans do


def _answer(directory: str, answers: int, wake: int) -> dict[str, object]:
    message = b""
    while True:
        readable = select.select([answers, wake, 0], [], [])[0]
        if answers in readable:
            chunk = os.read(answers, 65536)
            if not chunk:
                break
            message += chunk
        elif 0 in readable or _told(wake):
            return {"error": "told to end before the system was up"}
    if message:
        return dict(json.loads(message))
    with open(f"{directory}/{_ERRORS}", encoding="utf-8", errors="replace") as file:
        return {"error": f"the sandbox's first process died\n{file.read()}"}


def _told(wake: int) -> bool:
    return any(number != signal.SIGCHLD for number in os.read(wake, 64))


def _until_told(directory: str, wake: int, init: int) -> int:
    """Wait for the end that is wanted (0), or for that of the system's first process (1)."""
    watched = [0, wake]
    message = b""
    while True:
        readable = select.select(watched, [], [])[0]
        if 0 in readable:
            chunk = os.read(0, 64)
            message += chunk
            if message.startswith(KEEP):
                watched = [wake]
                with open(f"{directory}/{_STAYS}", "w", encoding="ascii"):
                    pass
                null = os.open(os.devnull, os.O_RDWR)
                for fd in range(3):  # whoever reads what `up` prints must see its end
                    os.dup2(null, fd)
            elif not chunk:
                return 0
        if wake in readable:
            if _told(wake):
                return 0
            if kernel.started_at(init) is None:
                return 1


# --- taking down -----------------------------------------------------------------------------------------------------


def _kill_init(directory: str, init: int | None, hierarchies: Sequence[str]) -> None:
    """Kill the namespace and wait for its last process: the init can be reaped only after that."""
    if init is None:
        return
    os.kill(init, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while os.waitpid(init, os.WNOHANG) == (0, 0):
        for name in hierarchies:
            _thaw(_group(directory, name))
        if time.monotonic() > deadline:
            raise TestbedError(f"processes of {directory} do not end within {_END_S} s of SIGKILL")
        time.sleep(0.01)


def _thaw(group: str) -> None:
    """Thaw frozen groups so that their processes can die: proctrack/cgroup freezes a step while it
    signals it.

    Groups may vanish meanwhile: their owner removes them as long as it lives.
    """
    for path, _, files in os.walk(group):
        if "freezer.state" in files:
            try:
                with open(f"{path}/freezer.state", "w", encoding="ascii") as file:
                    file.write("THAWED")
            except OSError as error:
                if error.errno not in _GONE:
                    raise


def _remove(directory: str, hierarchies: Sequence[str]) -> None:
    for name in hierarchies:
        mounted = f"{directory}/cgroup/{name}"
        if not os.path.ismount(mounted):
            continue
        for path, _, _ in os.walk(_group(directory, name), topdown=False):
            _remove_group(path)
        kernel.unmount(mounted)
    shutil.rmtree(directory)


def _remove_group(path: str) -> None:
    deadline = time.monotonic() + _END_S
    while True:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        # the kernel lets go of a dead process a moment after its parent has heard of it
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _group(directory: str, hierarchy: str) -> str:
    return f"{directory}/cgroup/{hierarchy}/{os.path.basename(directory)}"


def _mount_cgroup(target: str, hierarchy: str) -> None:
    try:
        kernel.mount("cgroup", target, "cgroup", 0, hierarchy)
    except OSError as error:
        raise TestbedError(
            f"no cgroup v1 hierarchy {hierarchy!r} here ({error}): the kernel lacks it, or cgroup "
            "v2 holds it"
        ) from error


# --- from outside ----------------------------------------------------------------------------------------------------


def instances(kind: str) -> list[str]:
    """List the directories of all sandboxes of a kind, whether their keepers live or not."""
    root = tempfile.gettempdir()
    return sorted(
        f"{root}/{name}" for name in os.listdir(root) if name.startswith(f"distlaunch-{kind}-")
    )


def is_kept(directory: str) -> bool:
    """Return whether the keeper of this sandbox lives, or may be about to begin."""
    try:
        fd = os.open(f"{directory}/{_LOCK}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.path.isdir(directory) and time.time() - os.stat(directory).st_mtime < _YOUNG_S
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def state(directory: str) -> str:
    """Return the state of a sandbox: ``dead`` (its keeper was killed), ``up`` (it stays), ``held``
    (it ends with its user)."""
    if not is_kept(directory):
        return "dead"
    return "up" if os.path.exists(f"{directory}/{_STAYS}") else "held"


def environment(directory: str) -> dict[str, str]:
    """Return the environment in which clients can use a sandbox's system."""
    found = _record(directory).get("environment")
    if not isinstance(found, dict) or not is_kept(directory):
        raise TestbedError(f"{directory} is not up")
    return found


def init_of(directory: str) -> int:
    """Return the pid of the first process of a sandbox that is up."""
    environment(directory)
    return int(_record(directory)["init"][0])


def take_down(directory: str) -> None:
    """End a sandbox, whether its keeper lives or was killed, and wait until nothing of it is
    left."""
    record = _record(directory)
    if not _end(record.get("keeper"), signal.SIGTERM):
        _end(record.get("keeper"), signal.SIGKILL)
    if not _end(record.get("init"), signal.SIGKILL):
        raise TestbedError(f"processes of {directory} do not end within {_END_S} s of SIGKILL")
    if not os.path.isdir(directory):
        return
    if is_kept(directory):
        raise TestbedError(f"{directory} is being brought up at this moment")
    kernel.private_mounts()
    hierarchies = os.listdir(f"{directory}/cgroup") if os.path.isdir(f"{directory}/cgroup") else []
    for name in hierarchies:
        _mount_cgroup(f"{directory}/cgroup/{name}", name)
    _remove(directory, hierarchies)


def _record(directory: str) -> dict[str, Any]:
    try:
        with open(f"{directory}/{_RECORD}", encoding="ascii") as file:
            return dict(json.load(file))
    except FileNotFoundError:
        return {}


def _end(process: tuple[int, int | None] | None, number: int) -> bool:
    """Signal a process that is still the one that we know; tell whether it ended in time."""
    if process is None or process[1] is None:
        return True
    pid, started = process
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if kernel.started_at(pid) != started:
            return True
        signal.pidfd_send_signal(handle, number)
        return bool(select.select([handle], [], [], _END_S)[0])
    finally:
        os.close(handle)
