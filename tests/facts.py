"""The facts that a message names: hosts, ranks, options, files and values, whatever its wording."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def mentions(messages: str | Iterable[str], *facts: object) -> bool:
    """Return whether one line of the messages has all these facts, in this order, as whole words."""
    pattern = re.compile(".*".join(_whole(str(fact)) for fact in facts))
    texts = [messages] if isinstance(messages, str) else messages
    return any(pattern.search(line) for text in texts for line in text.splitlines())


def _whole(fact: str) -> str:
    before = r"(?<!\w)" if re.match(r"\w", fact) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", fact) else ""
    return before + re.escape(fact) + after
