from __future__ import annotations

import json

import pytest

from distlaunch.transport.connection import (
    ConnectionEnd,
    EndKind,
    behind_shell,
    describe_end,
    end_from_json,
    end_of_program,
    end_to_json,
)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "its agent ended with status 3: last"),
        (128, "its agent ended with status 128: last"),
        (137, "its agent was killed by signal 9: last"),
        (-9, "its agent was killed by signal 9: last"),
        (None, "its agent closed its output: last"),
    ],
)
def test_a_status_above_128_is_a_signal_where_a_shell_is_the_parent(code, text):
    assert describe_end(behind_shell(end_of_program(code, ": last")), "its agent") == text


@pytest.mark.parametrize("kind", EndKind)
def test_every_end_has_words_and_survives_its_way_from_another_process(kind):
    end = ConnectionEnd(kind=kind, number=9, text="\x1b what it says", last_words=": last")
    found = end_from_json(json.loads(json.dumps(end_to_json(end))))
    assert (found.kind, found.number, found.last_words) == (kind, 9, ": last")
    assert describe_end(found).endswith(": last")
    assert "\x1b" not in describe_end(found)
