"""Run a Python program as a child, as a wrapper does that neither executes it nor passes signals on: ``wraps.py PROGRAM ARGS``."""

from __future__ import annotations

import subprocess
import sys

if __name__ == "__main__":
    sys.exit(subprocess.Popen([sys.executable, *sys.argv[1:]]).wait())
