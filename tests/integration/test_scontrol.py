"""Our grammar of node lists against Slurm's own: ``scontrol show hostnames``, which needs no
running Slurm.

Debian's package ``slurm-client`` has it (``scripts/test`` installs it). LISTS=10000 makes the
comparison a long one.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import expand_nodelist

LISTS = int(os.environ.get("LISTS", "2000"))

ODD = [
    "gpu-a[08-10]",
    "n[9-011]",
    "n[008-011]",
    "n[009-11]",
    "n[1-2][3-4]",
    "n[3,1-2][4,3]",
    "rack[0-1]node[0-1]",
    "x[1-2]y[1-2]z[1-2]",
    "x[1-2]y[1-3]z[1-2]w[1-2]",
    "a[1-2]b[1-2]c[1-2]d[1-2]e[1-2]",
    "a[1,3]b[08-10]c[5,4,3]",
    "a[1-2]5[1-2]",
    "a07[1-2]",
    "cpu1,gpu-a[08,10]",
    "a1,a1,a2",
    "n[1-2],n[1-2]",
    "n[1-2,1,001]",
    "[1-3]",
    "[1-3][1-2]",
    ",n1,,n2,",
    "a1 a2, a3",
    "n[5-5]",
    "n[000000000000000000000000000001-3]",
    "n[0-65535]",
]
REFUSED_BY_BOTH = [
    "n[3-1]",
    "n[]",
    "n[1-9:2]",
    "n[1-9/2]",
    "n[a-c]",
    "n[1,]",
    "n[1,,2]",
    "n[-1]",
    "n[1]]",
    "n[0-65536]",
]
ONLY_OURS = {
    "rack[1-2]-ib": ["rack1-ib", "rack2-ib"],
    "c[3,5]x": ["c3x", "c5x"],
    "n[1]m[2]x": ["n1m2x"],
}
ONLY_SCONTROLS = ["n[1", "n[1-]", "n[+1-3]", "(n1)", "n{1-2}"]


NAMES = ["n", "gpu-a", "rack", "x.y", "login_", "7n", "n-"]


def some_list(rng: random.Random) -> str:
    return ",".join(some_item(rng) for _ in range(rng.choice([1, 1, 2, 3, 6])))


def some_item(rng: random.Random) -> str:
    groups = rng.choice([0, 1, 1, 1, 2, 2, 3, 4])
    return rng.choice(NAMES) + "".join(
        some_group(rng) + (rng.choice(["", "-", "n", ".b", "5"]) if n < groups - 1 else "")
        for n in range(groups)
    )


def some_group(rng: random.Random) -> str:
    return f"[{','.join(some_range(rng) for _ in range(rng.choice([1, 1, 2, 3])))}]"


def some_range(rng: random.Random) -> str:
    low = rng.choice([rng.randrange(4), rng.randrange(12), 98, 998])
    high = low + rng.randrange(5)
    first = str(low).zfill(rng.choice([0, 0, 2, 3, 4]))
    if rng.random() < 0.3:
        return first
    return f"{first}-{str(high).zfill(rng.choice([0, len(first), 3]))}"


@pytest.fixture
def scontrol(tmp_path):
    """Return a function that makes one scontrol expand many lists. A refused list gives nothing."""
    program = shutil.which("scontrol")
    assert program, "Debian's slurm-client is needed, scripts/test installs it"
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("ClusterName=none\nSlurmctldHost=localhost\n")

    environment = {
        "SLURM_CONF": str(configuration),
        "PATH": os.environ["PATH"],
        "TERM": "dumb",
        "COLUMNS": "32000",
    }

    def output_of(*words, commands=""):
        ended = subprocess.run(
            [program, *words],
            input=commands,
            capture_output=True,
            text=True,
            env=environment,
            check=False,
            timeout=100,
        )
        return ended.stdout.splitlines()

    def expand(lists):
        if any(" " in text for text in lists):  # which would be several words of a command
            return [output_of("show", "hostnames", text) for text in lists]
        lines = output_of(
            commands="".join(f"show hostnames {text}\nshow hostnames end\n" for text in lists)
            + "quit\n"
        )
        answers = iter(
            line for line in lines if not line.startswith("scontrol: ")
        )  # its prompt, with the command
        return [list(iter(lambda: next(answers), "end")) for _ in lists]

    return expand


def ours(text: str) -> list[str]:
    try:
        return expand_nodelist(text, where="SLURM_JOB_NODELIST")
    except ConfigError:
        return []


def test_odd_lists_expand_as_scontrol_has_them(scontrol):
    assert dict(zip(ODD, map(ours, ODD), strict=True)) == dict(zip(ODD, scontrol(ODD), strict=True))
    assert all(map(ours, ODD))


def test_random_lists_expand_as_scontrol_has_them(scontrol):
    rng = random.Random(22058)
    lists = [some_list(rng) for _ in range(LISTS)]
    theirs = scontrol(lists)
    assert all(theirs)
    different = [
        (text, ours(text), names)
        for text, names in zip(lists, theirs, strict=True)
        if ours(text) != names
    ]
    assert different == []


def test_a_list_that_scontrol_refuses_is_refused(scontrol):
    assert scontrol(REFUSED_BY_BOTH) == [[] for _ in REFUSED_BY_BOTH]
    assert [text for text in REFUSED_BY_BOTH if ours(text)] == []


def test_backward_range_is_refused_also_where_scontrol_drops_its_item(scontrol):
    assert scontrol(["a1,n[1]m[4-3]x[2]y[3]"]) == [
        ["a1"]
    ]  # with an error on stderr, and exit code 0
    assert ours("a1,n[1]m[4-3]x[2]y[3]") == []


def test_suffix_after_the_last_bracket_is_taken_beyond_scontrol(scontrol):
    assert scontrol(ONLY_OURS) == [[] for _ in ONLY_OURS]
    assert {text: ours(text) for text in ONLY_OURS} == ONLY_OURS


def test_names_that_nobody_meant_are_refused_though_scontrol_makes_them(scontrol):
    assert all(scontrol(ONLY_SCONTROLS))
    assert [text for text in ONLY_SCONTROLS if ours(text)] == []


def test_a_blank_in_brackets_is_ignored_where_scontrol_counts_it_as_a_digit(scontrol):
    assert ours("n[ 1-2]") == ["n1", "n2"]
    assert scontrol(["n[ 1-2]"]) == [["n01", "n02"]]
