"""Show worker output and distlaunch's own messages on a terminal, in a pipe or in a file.

Output passes through these modules in this order:

* ``console`` selects ranks. It has the only lock.
* ``screen`` (or ``jsonl``, ``torchrun_style``) formats the output.
* ``lines`` splits chunks into lines, bars and displays.
* ``equal_lines`` and ``repeated_blocks`` join equal lines of several ranks.
* ``writer`` has a bounded buffer and a thread for each descriptor.

On a terminal, ``live_rows`` and ``terminal_writer`` draw progress bars and the status line at the
bottom.
"""
