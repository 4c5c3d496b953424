"""The time of held lines stands still while a slow reader blocks reading from workers."""

from __future__ import annotations

import os
import select
import threading

import pytest

from distlaunch.console.console import open_console
from distlaunch.console.lines import PARTIAL_S

WHOLE = b"x" * 70 + b"\n"


@pytest.mark.parametrize("form", ["plain", "jsonl"])
def test_a_line_whose_rest_nobody_reads_yet_is_not_shown_in_parts(form):
    end, other = os.pipe()
    console = open_console(world_size=2, environ={}, format=form, stdout_fd=other, stderr_fd=other)
    again = threading.Event()
    console.on_room(again.set)
    while console.has_room():
        console.output(0, 1, WHOLE * 1000, 0.0)
    console.output(0, 1, b"first half, ", 0.0)
    console.tick(0.0)
    console.tick(60.0)
    seen = bytearray()
    while not console.has_room():
        again.clear()
        if select.select([end], [], [], 0.01)[0]:
            seen += os.read(end, 1 << 16)
    due = console.tick(61.0)
    assert due is not None
    assert due >= 61.0
    console.output(0, 1, b"second half\n", 61.0 + PARTIAL_S / 2)
    reader = threading.Thread(
        target=lambda: seen.extend(b"".join(iter(lambda: os.read(end, 1 << 16), b"")))
    )
    reader.start()
    console.close(timeout_s=None)
    os.close(other)
    reader.join()
    os.close(end)
    assert b"first half, second half" in seen
    assert b"partial" not in seen
