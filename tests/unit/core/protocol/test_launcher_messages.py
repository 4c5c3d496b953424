from __future__ import annotations

import json
import struct

import pytest

from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import VERSION, Decoder

APPLY = {
    "num_nodes": [2, 4],
    "slots": 8,
    "command": "",
    "backend": "ray",
    "choices": "",
    "clock": 7.0,
    "wall": 8.0,
    "attempt": -1,
    "restarts": 0,
}


def read(**changed) -> p.LauncherInfo:
    body = json.dumps({"t": "LauncherInfo", **APPLY, **changed}).encode()
    [message] = Decoder(p.FROM_LAUNCHER, m.REMOTE_NESTED_TYPES).feed(
        struct.pack(">BII", VERSION, len(body), 0) + body
    )
    return message


@pytest.mark.parametrize(
    ("attempt", "restarts"), [(-1, 0), (0, 0), (7, 3), (p.MOST_ATTEMPTS - 1,) * 2]
)
def test_possible_numbers_of_attempts_are_accepted(attempt, restarts):
    assert (read(attempt=attempt, restarts=restarts).attempt, read(num_nodes=[2, 4]).num_nodes) == (
        attempt,
        (2, 4),
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"attempt": -2},
        {"attempt": p.MOST_ATTEMPTS},
        {"attempt": 1 << 62},
        {"attempt": 1, "restarts": -1},
        {"attempt": 3, "restarts": 4},
        {"restarts": 1 << 62},
        {"num_nodes": []},
        {"num_nodes": [2]},
        {"num_nodes": [1, 2, 3]},
        {"num_nodes": None},
    ],
)
def test_impossible_numbers_of_attempts_are_refused(changed):
    with pytest.raises(ProtocolError):
        read(**changed)


def test_another_attempt_may_follow_any_possible_number():
    assert p.is_possible_attempt(0)
    assert p.is_possible_attempt(p.MOST_ATTEMPTS, p.MOST_ATTEMPTS)
    assert not any(
        (
            p.is_possible_attempt(-1),
            p.is_possible_attempt(p.MOST_ATTEMPTS + 1),
            p.is_possible_attempt(1, 2),
            p.is_possible_attempt(1, -1),
        )
    )
