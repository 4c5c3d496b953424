"""One row of the table of hints."""

from __future__ import annotations

import re
from collections.abc import Callable

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.diagnosis.failure_kinds import Failure, FailureKind


class HintRow(Record):
    """One row of the table. It matches a failure that fulfils all of its conditions."""

    kind: FailureKind
    hint: str | Callable[[Failure], str | None]
    """The hint, with ``{name}`` for the group ``name`` of ``pattern``, ``{Opt.ENV}`` for the name of
    an option, and ``{shm}`` for the size of /dev/shm. Or a function that returns the hint, or None
    if the row does not apply."""
    marks: tuple[str, ...] = ()
    """Texts in lower case, of which one must occur in the failure."""
    pattern: str | None = None
    """Regular expression, searched without regard to case."""
    in_output: bool = False
    """Search in the last lines of stderr, not only in the exception."""
    types: tuple[str, ...] = ()
    """Names of exceptions, without their modules."""
    when: Callable[[Failure], bool] | None = None
    tells_why_ranks_did_not_meet: bool = False
    """Whether the hint explains why ranks did not join a collective, even running ones."""

    def hint_of(self, failure: Failure) -> str | None:
        """Return the hint for a failure, if the row matches."""
        words = failure.lower_output if self.in_output else failure.lower
        if self.marks and not any(mark in words for mark in self.marks):
            return None
        if self.types and failure.types.isdisjoint(self.types):
            return None
        found = None
        if self.pattern is not None:
            text = failure.output if self.in_output else failure.text
            found = re.search(self.pattern, text, re.IGNORECASE)
            if found is None:
                return None
        if self.when is not None and not self.when(failure):
            return None
        if not isinstance(self.hint, str):
            return self.hint(failure)
        groups = found.groupdict() if found is not None else {}
        return self.hint.format(**groups, Opt=Opt, shm=failure.shared_memory)
