"""A worker like ``waits_for_signs.py`` that only KILL ends."""

import os
import runpy
import signal

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
runpy.run_path(os.path.join(os.path.dirname(__file__), "waits_for_signs.py"), run_name="__main__")
