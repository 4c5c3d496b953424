# expect-rank: 0
# expect-exit: 1
# expect-cause: ValueError: größe ✓
# expect-frame: hostile_message.py:11 in talk
"""The message holds escape sequences that would retitle or clear a terminal: none may come through."""

from _group import RANK, sleep_until_stopped


def talk() -> None:
    raise ValueError("größe ✓ \x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b5A\r\x08\u202eevil")


if RANK == 0:
    talk()
sleep_until_stopped()
