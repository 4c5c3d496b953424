"""The console: where worker output and the launcher's own lines reach the screen, a pipe or a file.

The way of a chunk: ``console`` (one lock, which ranks are shown) -> ``screen`` (``jsonl`` for JSON,
``torchrun_style`` for torchrun's users) -> ``lines`` (whole lines, bars, displays) -> ``equal_lines`` and
``repeated_blocks`` (the same line from many ranks becomes one) -> ``writer`` (a bounded buffer and a
thread for each of the descriptors 1 and 2). On a terminal ``live_rows`` and ``terminal_writer`` keep
bars and the status line at the bottom of the screen.
"""
