"""Entry point of an agent that srun starts. The agent connects to the launcher.

srun starts a Python with a stub (``transport.bootstrap.stub``), which reads the zip with this
module from stdin and calls ``main``. Once the launcher has answered, the agent closes the stdin and
output from srun. Otherwise a process that survives the agent and holds srun's output would keep
srun from ending. Signals sent by srun are meant for the job, so the agent reports them to the
coordinator.
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
from distlaunch.core.agent.main import LOWEST_CHANNEL_FD, serve, write_exit_reason
from distlaunch.core.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, LaunchError
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.core.protocol.token_keys import TOKEN

_SRUN_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"
"""Variable with the address of srun's host, as seen from this node."""


def main(arguments: Sequence[str], code_fd: int) -> NoReturn:
    """Run the agent of this node and exit.

    ``arguments``: the launcher's addresses (separated by commas), its port, the job key, and the
    seconds within which it must answer. The token is in the environment.
    """
    code = EXIT_SOFTWARE
    try:
        # until they can be reported to the launcher
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        addresses, port, job_key, within_s = arguments
        token = os.environ.pop(TOKEN, "").encode()
        job_identity = JobIdentity(release=__version__, job_key=job_key, token=token or None)
        hosts = dict.fromkeys((os.environ.get(_SRUN_ADDRESS, ""), *addresses.split(",")))
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
        code = serve(
            lambda: _replace_descriptors(connection), code_fd, greeting=b"", reports_signals=True
        )
    except LaunchError as exc:
        code = EXIT_UNAVAILABLE
        write_exit_reason(exc.message)
    except OSError as exc:
        write_exit_reason(f"the agent cannot run: {exc.strerror or exc}")
    except Exception:  # noqa: BLE001 - no caller could report it
        import traceback

        write_exit_reason(traceback.format_exc())
    finally:
        os._exit(code)  # threads may be stuck in a file system


def _replace_descriptors(connection: socket.socket) -> tuple[int, int]:
    """Return two descriptors of the connection, and replace srun's streams by /dev/null.

    The numbers are above the workers' descriptors, unless the limit of open files is low.
    """
    numbers = []
    for _ in range(2):
        try:
            numbers.append(
                fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, LOWEST_CHANNEL_FD)
            )
        except OSError:  # the limit of open files is low
            numbers.append(fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
    connection.close()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(null, number)
    if null > 2:
        os.close(null)
    reading, writing = numbers
    return reading, writing
