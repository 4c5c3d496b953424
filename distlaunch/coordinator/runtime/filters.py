"""Lines of several ranks picked into one file, as torchrun's --duplicate-stdout-filters does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from distlaunch.core.agent.workers.log_files import open_to_append

_LONGEST_LINE = 64 << 10


class LineFilter:
    """Copies whole lines that contain one of ``needles``, with their rank's prefix; called by the pump's thread.

    ``prefixes`` has the ranks whose lines count. A line of more than 64 KiB is looked at in parts. What the disk does
    not take is missing in this copy only: the rank's own file has every byte, and says when it has not.
    """

    def __init__(self, needles: Sequence[bytes], prefixes: Mapping[int, bytes]) -> None:
        self._needles = tuple(needles)
        self._prefixes = prefixes
        self._begun: dict[int, bytes] = {}
        self._descriptor = -1
        self.first_rank = 0
        """``prefixes`` counts from this rank on."""
        self.suffix = ""
        """What the file's name has beside that of the other launchers of the job."""

    def begin(self, path: str) -> None:
        """Write to this file from now on."""
        self.close()
        stem, dot, ending = path.rpartition(".")
        path = f"{stem}{self.suffix}{dot}{ending}"
        try:
            self._descriptor = open_to_append(path)
        except OSError:
            self._descriptor = -1

    def output(self, rank: int, data: bytes) -> None:
        """Take a chunk."""
        if rank - self.first_rank not in self._prefixes:
            return
        *lines, rest = (self._begun.pop(rank, b"") + data).split(b"\n")
        self._write(rank, lines)
        if len(rest) > _LONGEST_LINE:
            self._write(rank, [rest])
            rest = b""
        if rest:
            self._begun[rank] = rest

    def rank_ended(self, rank: int) -> None:
        """Look at a last line without its newline."""
        if rest := self._begun.pop(rank, b""):
            self._write(rank, [rest])

    def close(self) -> None:
        """Close the file."""
        self._begun.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, rank: int, lines: Sequence[bytes]) -> None:
        prefix = self._prefixes[rank - self.first_rank]
        picked = [prefix + line + b"\n" for line in lines if any(needle in line for needle in self._needles)]
        if not picked or self._descriptor < 0:
            return
        data = b"".join(picked)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return
