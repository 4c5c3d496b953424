# expect-rank: 3
# expect-exit: 1
# expect-cause: KeyError: 'lr'
# expect-frame: key_error_in_nested_calls.py:14 in rate
"""The failing line is in the user's code, below it a frame of the standard library."""

import json

from _group import RANK, sleep_until_stopped


class Config(dict[str, float]):
    def rate(self) -> float:
        return self["lr"]


def load(pairs: list[tuple[str, float]]) -> float:
    return Config(pairs).rate()


if RANK == 3:
    json.loads('{"momentum": 0.9}', object_pairs_hook=load)
sleep_until_stopped()
