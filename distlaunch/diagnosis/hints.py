"""Find the hint for a failure in the table of hints."""

from __future__ import annotations

from distlaunch.core.model.record import replace
from distlaunch.diagnosis.consequence import Standing
from distlaunch.diagnosis.evidence import FailureEvidence
from distlaunch.diagnosis.failure_kinds import Failure, Hint
from distlaunch.diagnosis.hint_table import ROWS, ROWS_BY_TEXT


def hint_for(
    evidence: FailureEvidence,
    *,
    python: str | None,
    world_size: int,
    adds_local_rank: bool = False,
    dashes_first: bool = False,
    master_port: int | None = None,
    nodes: int = 1,
) -> Hint | None:
    """Return what the user can do about a failure, if a useful hint is known.

    If the worker only waited for another rank or lost it, rows that examine how the worker ended
    are skipped. ``python`` is the workers' interpreter. ``adds_local_rank``: the launcher has given
    the script ``--local_rank=N``. ``dashes_first``: the script's first argument is ``--``.
    ``nodes`` is the number of nodes on which workers ended.
    """
    texts = (evidence.text, f"{evidence.text}\n{evidence.between}")
    for text in texts if evidence.between else texts[:1]:
        failure = Failure(
            replace(evidence, text=text),
            python=python,
            world_size=world_size,
            adds_local_rank=adds_local_rank,
            dashes_first=dashes_first,
            master_port=master_port,
            nodes=nodes,
        )
        for row in ROWS if evidence.standing < Standing.TIMED_OUT else ROWS_BY_TEXT:
            if (hint := row.hint_of(failure)) is not None:
                return Hint(
                    kind=row.kind,
                    text=hint,
                    tells_why_ranks_did_not_meet=row.tells_why_ranks_did_not_meet,
                )
    return None
