"""The console: where worker output and the launcher's own lines reach the screen, a pipe or a file.

The way of a chunk: ``console`` (one lock, which ranks are shown) -> ``screen`` or ``terminal``
(lines, prefixes, bars; ``records`` under jsonl) -> ``folding`` and ``blocks`` (the same line from
many ranks becomes one) -> ``writer`` (a bounded buffer and a thread for each of the descriptors 1
and 2).
"""
