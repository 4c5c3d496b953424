"""What is another way for those who come with another launcher's words and tools. Pure."""

from __future__ import annotations

from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import TRAIN, Layout


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
    shows_bars: bool = True
    """The console shows both streams of rank 0, if it shows that rank."""
    rank_macro: str | None = None
    """What stands for the local rank in the arguments of the script."""
    takes_typed: bool = False
    """Of several workers rank 0 reads what is typed, if stdin is a terminal of which we are the foreground job."""
    spelling: tuple[tuple[str, str], ...] = ()
    """What ``train``'s options are called, for hints and errors: its spelling, then this dialect's; # is any number."""

    def spelt(self, text: str) -> str:
        """Put a text of ours, which speaks of ``train``'s options, into this dialect."""
        if not self.spelling:
            return text
        import re

        words = dict(self.spelling)
        longest_first = sorted(words, key=len, reverse=True)
        forms = [re.escape(key).replace(r"\#", "[0-9]+") for key in longest_first]

        def other(found: re.Match[str]) -> str:
            key = longest_first[(found.lastindex or 1) - 1]
            before, number, _ = key.partition("#")
            if not number:
                return words[key]
            rest = found[0][len(before) :]
            return words[key].replace("#", rest[: len(rest) - len(rest.lstrip("0123456789"))])

        return re.sub(rf"(?<![\w-])(?:{'|'.join(f'({form})' for form in forms)})(?![\w-])", other, text)
