"""Act as a shell with job control on the terminal at 0: run one command in the foreground, tell and obey on a socket.

It is the session's leader. On the descriptor FD it writes ``started PID``, ``stopped SIGNAL`` and ``ended CODE``; it
reads ``fg``: continue the job in the foreground. It never touches the terminal's modes, as simple shells do not.
"""

import os
import signal
import sys

channel = int(sys.argv[1])
os.set_inheritable(channel, False)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
    signal.signal(number, signal.SIG_IGN)
ready, go = os.pipe()
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    os.read(ready, 1)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_DFL)
    os.execv(sys.argv[2], sys.argv[2:])
try:
    os.setpgid(pid, pid)
except OSError:
    pass
os.tcsetpgrp(0, pid)
os.write(go, b".")
os.write(channel, b"started %d\n" % pid)
while True:
    _, status = os.waitpid(pid, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        os.write(channel, b"ended %d\n" % os.waitstatus_to_exitcode(status))
        break
    os.write(channel, b"stopped %d\n" % os.WSTOPSIG(status))
    if os.read(channel, 16) != b"fg\n":
        break
    os.tcsetpgrp(0, pid)
    os.killpg(pid, signal.SIGCONT)
