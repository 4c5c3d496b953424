"""Show worker output and distlaunch's own messages on a terminal, in a pipe or in a file.

Output passes through these modules: ``console`` (selects ranks, has the only lock), ``screen`` (or
``jsonl``, ``torchrun_style``), ``lines`` (splits chunks into lines, bars and displays),
``equal_lines`` and ``repeated_blocks`` (join equal lines of several ranks), and ``writer`` (a
bounded buffer and a thread for each descriptor). On a terminal, ``live_rows`` and
``terminal_writer`` keep progress bars and the status line at the bottom.
"""
