"""Where an agent on a machine of its own begins: the process, made fit for it, and its end.

The launcher's stub has put the zip with this code on ``sys.path`` and calls ``main``. Descriptors 0
and 1 are the channel, 2 takes last words, for whoever asks why the channel has ended.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from distlaunch.core.agent.workers.spawner import start_spawner
from distlaunch.core.errors import EXIT_SOFTWARE
from distlaunch.core.protocol.agent_messages import GREETING, SILENCE_S

ORPHAN_S = 5.0
"""The grace of workers whose coordinator vanishes, where it has not said another: --failure-grace's
default."""
ABOVE = 200
"""The channel's numbers: workers' own descriptors are below."""
_MOST_FILES = 1 << 16
_WORDS_BYTES = 4096


def main(word: str, code_fd: int, *, silence_s: float = SILENCE_S) -> NoReturn:
    """Be the agent of this node to its end. ``word`` stands in the greeting; ``code_fd`` is the
    zip's descriptor."""
    code = EXIT_SOFTWARE
    try:
        greeting = GREETING + word.encode() + b"\n"
        code = serve(
            _take_channel, code_fd, greeting=greeting, passes_signals=False, silence_s=silence_s
        )
    except OSError as exc:
        of = f": {exc.filename}" if exc.filename else ""
        last_words(f"the agent cannot work: {exc.strerror or exc}{of}")
    except Exception:  # noqa: BLE001 - nobody above could tell of it
        import traceback

        last_words(traceback.format_exc())
    finally:
        os._exit(code)  # threads may hang where a file system does


def serve(
    open_channel: Callable[[], tuple[int, int]],
    code_fd: int,
    *,
    greeting: bytes,
    passes_signals: bool,
    silence_s: float = SILENCE_S,
) -> int:
    """Be the agent to its end, over descriptors to read and to write; give the exit code. Raises
    OSError.

    ``passes_signals``: those that it gets are for the job, and the coordinator decides.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    nofile = _allow_descriptors()
    reading, writing = open_channel()
    os.set_inheritable(code_fd, False)  # noqa: FBT003 - positional-only in the standard library
    # what is there stays: looking at it again would only have forked children copy its pages
    gc.freeze()
    gc.enable()  # the launcher's stub has turned it off
    channel, watcher = start_spawner(
        job_id="", orphan_grace_s=ORPHAN_S, keep=(code_fd,), watched=reading
    )

    from distlaunch.core.agent.remote_agent import RemoteAgent

    agent = RemoteAgent(
        greeting=greeting,
        code_fd=code_fd,
        reading=reading,
        writing=writing,
        nofile=nofile,
        silence_s=silence_s,
        channel=channel,
        watcher=watcher,
        passes_signals=passes_signals,
        orphan_grace_s=ORPHAN_S,
        write_reason=last_words,
    )
    return agent.run()


def last_words(text: str) -> None:
    """Say on stderr why this process ends, if somebody reads that."""
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"distlaunch: {text}\n".encode("utf-8", "replace")[:_WORDS_BYTES])


def _take_channel() -> tuple[int, int]:
    """Move the channel away from 0 and 1, where anything that prints would print into it."""
    try:
        reading, writing = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, ABOVE) for number in (0, 1))
    except OSError:  # few files may be open
        reading, writing = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3) for number in (0, 1))
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    try:
        same = os.path.samestat(os.fstat(2), os.fstat(writing))
    except OSError:  # there is no stderr
        same = True
    if same:
        os.dup2(null, 2)
    os.dup2(2, 1)
    os.close(null)
    return reading, writing


def _allow_descriptors() -> int:
    """Raise our own limit of open files, for many workers; give the soft limit that we found, which
    is theirs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return soft
