"""How many examples a property test tries: few; ``FUZZ_EXAMPLES=2000 scripts/test tests/unit`` is
the long form."""

from __future__ import annotations

import os


def examples(few: int) -> int:
    """Return ``few``, or the number that ``FUZZ_EXAMPLES`` gives for all tests."""
    return int(os.environ.get("FUZZ_EXAMPLES", few))
