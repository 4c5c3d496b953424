"""Leave something behind that does not want to end: ``leaves.py KIND END``; ``left-<rank>`` has the pid.

KIND: see below. END: an exit code, ``wait`` (to be stopped), or ``check``: exit 0 if that still runs at the sign ``look``,
or ``once``: 3 in attempt 0 when all are ready, later wait with ``ready-<rank>-<attempt>`` put up and nothing left. ``ready-<rank>`` is put up before.
``--ranks``: who leaves something and ends; the others wait, with ``check`` until the sign ``go``.
``--ignore-term``: put up ``asked-<rank>`` at TERM, and go on.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time

import survivor
from signs import await_sign, sign

LIFE_S = 100  # nothing that a test leaves behind by mistake lives longer


def linger():
    signal.alarm(LIFE_S)
    while True:
        signal.pause()


def announce():
    sign(f"left-{rank}", str(os.getpid()))


def daemon():
    """Double fork with a session of its own, away from the worker before it ends."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            announce()
            linger()
        os._exit(0)
    os.wait()


def child():
    if os.fork() == 0:
        announce()
        linger()


def session():
    if os.fork() == 0:
        os.setsid()
        announce()
        linger()


def clean_daemon():
    """Neither session nor environment tells whose it is."""
    code = f"import os, signal, sys; sys.path[:0] = [{os.path.dirname(os.path.abspath(__file__))!r}]\nfrom signs import sign\nif os.fork(): os._exit(0)\nsign('left-{rank}', str(os.getpid()))\nsignal.alarm({LIFE_S})\nwhile True: signal.pause()"
    subprocess.run(["env", "-i", "setsid", sys.executable, "-c", code], close_fds=False, check=True)
    await_sign(f"left-{rank}")


def renamed():
    """setproctitle writes over the environment."""
    import setproctitle

    if os.fork() == 0:
        os.setsid()
        setproctitle.setproctitle("sshd: nobody " + "x" * 4000)
        announce()
        linger()


def new_name():
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(15, b"kworker/0:1", 0, 0, 0)
        announce()
        linger()


def ignores_term():
    if os.fork() == 0:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if number < 32 and number != signal.SIGALRM:
                signal.signal(number, signal.SIG_IGN)
        announce()
        linger()


def stopped():
    if os.fork() == 0:
        announce()
        os.kill(os.getpid(), signal.SIGSTOP)
        linger()
    await_sign(f"left-{rank}")
    os.waitpid(-1, os.WUNTRACED)


def bomb():
    """85 processes, in four generations of four each."""

    def explode(depth):
        for _ in range(4 if depth else 0):
            if os.fork() == 0:
                explode(depth - 1)
                if depth == 1:
                    announce()
                linger()

    explode(3)


def hopping():
    """A process that is another one every few milliseconds: fork, parent ends."""
    if os.fork() == 0:
        os.setsid()
        end = time.monotonic() + 30
        announce()
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
            time.sleep(0.003)
        os._exit(0)


def swarm():
    """Eight processes that hop without a pause, for twenty seconds where nobody ends them."""
    end = time.monotonic() + 20
    for _ in range(8):
        if os.fork() == 0:
            os.setsid()
            announce()
            while time.monotonic() < end:
                if os.fork():
                    os._exit(0)
            os._exit(0)


KINDS = {
    function.__name__: function
    for function in (child, session, daemon, clean_daemon, renamed, new_name, ignores_term, stopped, bomb, hopping, swarm)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="0")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("end")
    options = parser.parse_args()
    rank = os.environ["RANK"]
    survivor.hold()
    if options.ignore_term:
        signal.signal(signal.SIGTERM, lambda *_: sign(f"asked-{rank}"))
    if options.end == "once" and (attempt := os.environ["DISTLAUNCH_ATTEMPT"]) != "0":
        for other in range(int(os.environ["WORLD_SIZE"])):
            with open(f"left-{other}") as file:
                if os.path.exists(f"/proc/{file.read()}"):
                    sign("overlap")
        sign(f"ready-{rank}-{attempt}", str(os.getpid()))
        linger()
    if rank not in options.ranks.split(","):
        sign(f"ready-{rank}", str(os.getpid()))
        if options.end == "check":
            await_sign("go")
            sys.exit(0)
        linger()
    KINDS[options.kind]()
    await_sign(f"left-{rank}")
    sign(f"ready-{rank}", str(os.getpid()))
    if options.end == "wait":
        linger()
    if options.end == "check":
        await_sign("look")
        with open(f"left-{rank}") as file, open(f"/proc/{file.read()}/stat") as stat:
            os._exit(stat.read().rpartition(")")[2].split()[0] in "ZX")
    if options.end == "once":
        for other in range(int(os.environ["WORLD_SIZE"])):
            await_sign(f"ready-{other}")
        os._exit(3)
    os._exit(int(options.end))
