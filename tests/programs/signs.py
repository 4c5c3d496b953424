"""Signs from a program to its test and back: files in the working directory, complete from the moment they exist."""

from __future__ import annotations

import os
import sys
import time

WAIT_S = 60.0


def sign(name: str, text: str = "") -> None:
    """Put up a sign."""
    hidden = f".{name}.{os.getpid()}"
    with open(hidden, "w") as file:
        file.write(text)
    os.replace(hidden, name)


def await_sign(name: str) -> None:
    """Return when somebody has put up this sign; give up with exit code 98."""
    deadline = time.monotonic() + WAIT_S
    while not os.path.exists(name):
        if time.monotonic() > deadline:
            sys.exit(98)
        time.sleep(0.005)
