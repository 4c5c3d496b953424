"""Layer resolve: what is another way for those who come with another launcher's words and tools. Pure."""

from __future__ import annotations

from distlaunch.core.model.layout import TRAIN, Layout
from distlaunch.core.model.record import Record


class Dialect(Record):
    """How a job is seen from outside; as it stands, ``train``'s."""

    layout: Layout = TRAIN
    """The names of the log files."""
    run_id: str | None = None
    """What TORCHELASTIC_RUN_ID says; None: the job's id."""
    role: str = "default"
    """What ROLE_NAME says."""
    prefix_columns: int | None = None
    """How wide what stands before each line on the console is; None: as wide as a rank in brackets."""
    rank_macro: str | None = None
    """What stands for the local rank in the arguments of the script."""
    takes_typed: bool = False
    """Of several workers rank 0 reads what is typed, if stdin is a terminal of which we are the foreground job."""
    spelling: tuple[tuple[str, str], ...] = ()
    """What ``train``'s options are called, for hints and errors: its spelling, then this dialect's."""

    def spelt(self, text: str) -> str:
        """Put a text of ours, which speaks of ``train``'s options, into this dialect."""
        if not self.spelling:
            return text
        import re

        words = dict(self.spelling)
        longest_first = sorted(words, key=len, reverse=True)
        pattern = rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])"
        return re.sub(pattern, lambda found: words[found[0]], text)
