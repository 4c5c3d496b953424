"""Messages in the words of another launcher's options."""

from __future__ import annotations

import pytest

from distlaunch.planning.train_options import Dialect

DIALECT = Dialect(
    spelling=(
        ("--num-procs", "-np"),
        ("--num-procs N or more", "-np N"),
        ("--per-node # there, --num-nodes 1 here", "-H a:#,b:#"),
        ("--python /opt/py3.11", "/opt/py#3.11"),
    )
)


@pytest.mark.parametrize(
    ("text", "spelt"),
    [
        (
            "--num-procs 2, and not --num-procs-per or my--num-procs",
            "-np 2, and not --num-procs-per or my--num-procs",
        ),
        ("give --num-procs N or more", "give -np N"),
        ("--per-node 12 there, --num-nodes 1 here", "-H a:12,b:12"),
        ("--per-node 1 there, --num-nodes 2 here", "--per-node 1 there, --num-nodes 2 here"),
        ("--python /opt/py3.11: no", "/opt/py#3.11: no"),
    ],
)
def test_the_longest_of_our_words_becomes_theirs_with_its_number(text, spelt):
    assert DIALECT.spelt(text) == spelt
    assert Dialect().spelt(text) == text
