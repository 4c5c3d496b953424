"""A worker as ``member.py`` that no signal but KILL ends."""

import os
import runpy
import signal

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
runpy.run_path(os.path.join(os.path.dirname(__file__), "member.py"), run_name="__main__")
