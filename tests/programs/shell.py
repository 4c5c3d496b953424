"""Act as an interactive shell does: run the words given as a foreground job on the controlling terminal, stdin.

Signs: ``job`` (its pid), ``stopped-<n>`` at each stop; for each the sign ``fg-<n>`` is awaited before the job is continued. Exits as the job did (128+N for a signal).
"""

from __future__ import annotations

import os
import signal
import sys

from signs import await_sign, sign

signal.signal(signal.SIGTTOU, signal.SIG_IGN)
signal.signal(signal.SIGTSTP, signal.SIG_IGN)
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.execv(sys.argv[1], sys.argv[1:])
sign("job", str(pid))
stops = 0
while True:
    _, status = os.waitpid(pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        break
    os.tcsetpgrp(0, os.getpgid(0))
    stops += 1
    sign(f"stopped-{stops}", str(os.WSTOPSIG(status)))
    await_sign(f"fg-{stops}")
    os.tcsetpgrp(0, pid)
    os.killpg(pid, signal.SIGCONT)
code = os.waitstatus_to_exitcode(status)
os._exit(code if code >= 0 else 128 - code)
