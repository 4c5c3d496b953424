"""Where an agent begins that a scheduler's starter (srun) has started: it calls the launcher
itself.

The launcher's stub has put the zip with this code on ``sys.path`` and calls ``main``. Once the
launcher has answered, the starter's stdin and outputs are given up: nothing that the agent starts
may have them, for srun takes a task for running as long as somebody holds its output. Signals that
the starter sends are for the job, and are passed on.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import NoReturn

from distlaunch import __version__
from distlaunch.core.agent.connect import connect_to_listener
from distlaunch.core.agent.main import ABOVE, last_words, serve
from distlaunch.core.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, LaunchError
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.core.protocol.token_keys import TOKEN

_FIRST = "SLURM_LAUNCH_NODE_IPADDR"
"""Where srun itself was reached by this node."""


def main(words: Sequence[str], code_fd: int) -> NoReturn:
    """Be the agent of this node to its end.

    ``words``: the launcher's addresses (with commas), its port, the job's key, and within how many
    seconds it has to answer. The token is in the environment.
    """
    code = EXIT_SOFTWARE
    try:
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # until we can tell the launcher
            signal.signal(number, signal.SIG_IGN)
        addresses, port, job_key, within_s = words
        token = os.environ.pop(TOKEN, "").encode()
        job_identity = JobIdentity(release=__version__, job_key=job_key, token=token or None)
        hosts = dict.fromkeys((os.environ.get(_FIRST, ""), *addresses.split(",")))
        node = os.environ.get("SLURM_NODEID", "")
        connection, _ = connect_to_listener(
            [host for host in hosts if host],
            [int(port)],
            job_identity=job_identity,
            rank=int(node) if node.isascii() and node.isdecimal() else None,
            own_host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            instance=os.urandom(16).hex(),
            until=time.monotonic() + float(within_s),
            who="the launcher",
        )
        code = serve(lambda: _take_over(connection), code_fd, greeting=b"", passes_signals=True)
    except LaunchError as exc:
        code = EXIT_UNAVAILABLE
        last_words(exc.message)
    except OSError as exc:
        last_words(f"the agent cannot work: {exc.strerror or exc}")
    except Exception:  # noqa: BLE001 - nobody above could tell of it
        import traceback

        last_words(traceback.format_exc())
    finally:
        os._exit(code)  # threads may hang where a file system does


def _take_over(connection: socket.socket) -> tuple[int, int]:
    """Make the connection the channel, above the workers' own descriptors, and give up what srun
    gave us."""
    numbers = []
    for _ in range(2):
        try:
            numbers.append(fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, ABOVE))
        except OSError:  # few files may be open
            numbers.append(fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
    connection.close()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(null, number)
    if null > 2:
        os.close(null)
    reading, writing = numbers
    return reading, writing
