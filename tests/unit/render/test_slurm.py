from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError
from tests.examples import examples
from tests.unit.render.conftest import text_of

SIZE = ["--gpus-per-node=2"]


def options_in(body: str) -> dict[str, str]:
    """Return the #SBATCH options up to the first other line, as sbatch reads them."""
    found = {}
    for line in body.splitlines():
        if line.startswith("#SBATCH "):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            assert name not in found
            found[name] = value
        elif line and not line.startswith("#"):
            break
    return found


def words_of(body: str, tmp_path) -> list[str]:
    """Return the arguments with which a shell runs distlaunch in the script."""
    shown = tmp_path / "words"
    shown.unlink(missing_ok=True)
    program = tmp_path / "distlaunch"
    program.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {shlex.quote(str(shown))}\n")
    program.chmod(0o755)
    (tmp_path / "script").write_bytes(body.encode(errors="surrogateescape"))
    environ = {"PATH": f"{tmp_path}:{os.defpath}", "LC_ALL": "C.UTF-8"}
    subprocess.run(["bash", tmp_path / "script"], env=environ, check=True, timeout=60)
    return shown.read_bytes().decode(errors="surrogateescape").split("\0")[:-1]


def test_a_small_job_asks_for_little(text):
    body = text("slurm", *SIZE, "train.py")
    assert options_in(body) == {
        "job-name": "train",
        "nodes": "1",
        "gpus-per-node": "2",
        "exclusive": "",
        "output": "%x-%j.out",
        "open-mode": "append",
        "signal": "B:USR1@60",
        "requeue": "",
    }
    assert body.startswith("#!/bin/bash\n")
    assert body.endswith(
        "exec distlaunch train \\\n    --gpus-per-node=2 \\\n    --requeue \\\n    train.py\n"
    )


@pytest.mark.parametrize(
    ("words", "exclusive", "cpus"),
    [
        ([], True, None),
        (["--cpus=8"], False, "8"),
        (["--cpus-per-task=8"], False, "8"),
        (["--exclusive", "--cpus=8"], True, "8"),
        (["--no-exclusive"], False, None),
    ],
)
def test_a_job_has_whole_nodes_unless_the_number_of_cpus_is_given(text, words, exclusive, cpus):
    found = options_in(text("slurm", *words, *SIZE, "t.py"))
    assert ("exclusive" in found, found.get("cpus-per-task")) == (exclusive, cpus)


@pytest.mark.parametrize(
    ("words", "environ", "times"),
    [
        ([], {}, 1),
        (["--requeue"], {}, 1),
        (["--no-requeue"], {}, 0),
        ([], {"DISTLAUNCH_REQUEUE": "0"}, 0),
        ([], {"DISTLAUNCH_REQUEUE": "1"}, 1),
    ],
)
def test_a_job_is_requeued_unless_an_option_forbids_it(text, words, environ, times):
    body = text("slurm", *words, *SIZE, "t.py", "--requeue", **environ)
    assert body.count("    --requeue \\\n") == times
    assert ("requeue" in options_in(body)) == bool(times)
    assert body.endswith("    t.py --requeue\n")


@pytest.mark.parametrize(
    ("words", "signal"),
    [
        (["--usr1-before=300"], "B:USR1@300"),
        (["--usr1-before=5min", "--time=12h"], "B:USR1@300"),
        (["--usr1-before=0.5"], "B:USR1@1"),
    ],
)
def test_the_time_before_the_limit_can_be_chosen(text, words, signal):
    assert options_in(text("slurm", *words, *SIZE, "t.py"))["signal"] == signal


@pytest.mark.parametrize(
    "words", [["--usr1-before=0"], ["--usr1-before=12h", "--time=12h"], ["--usr1-before=1d"]]
)
def test_a_time_before_the_limit_that_sbatch_cannot_have_is_refused(text, words):
    with pytest.raises(ConfigError, match="--usr1-before"):
        text("slurm", *words, *SIZE, "t.py")


def test_the_script_in_the_documentation_is_the_one_that_is_rendered(text):
    page = (Path(__file__).parents[3] / "distlaunch" / "docs" / "slurm.md").read_text("utf-8")
    command, script = re.search(
        r"`distlaunch render slurm ([^`]*)` prints:\n\n```bash\n(.*?)```\n", page, re.DOTALL
    ).groups()
    assert script == text("slurm", *shlex.split(command))


def test_every_option_of_slurms_has_its_line(text):
    words = [
        "--name=a.b-1",
        "--time=90m",
        "--cpus=16",
        "--memory=64Gi",
        "--partition=gpu,a100",
        "--account=proj@x",
        "--num-nodes=4",
    ]
    found = options_in(text("slurm", *words, "--max-restarts=2", "--grace=120", *SIZE, "t.py"))
    assert (found["job-name"], found["time"], found["nodes"]) == ("a.b-1", "01:30:00", "4")
    assert (found["cpus-per-task"], found["mem"], found["partition"], found["account"]) == (
        "16",
        "64G",
        "gpu,a100",
        "proj@x",
    )
    assert (found["requeue"], found["signal"]) == ("", "B:USR1@150")
    assert "no-kill" not in found


def test_a_grace_of_a_day_gives_no_signal_that_sbatch_refuses(text):
    assert options_in(text("slurm", "--grace=24h", *SIZE, "t.py"))["signal"] == "B:USR1@65535"


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["--num-nodes=2:4"], "2-4"),
        (["--num-nodes=4", "--spares=1"], "5"),
        (["--num-nodes=2:4", "--spares=1"], "3-5"),
    ],
)
def test_an_elastic_job_survives_the_loss_of_a_node(text, words, nodes):
    found = options_in(text("slurm", *words, *SIZE, "t.py"))
    assert (found["nodes"], found["no-kill"]) == (nodes, "")


def test_workers_on_cpus_ask_for_no_gpus(text):
    assert "gpus-per-node" not in options_in(text("slurm", "--procs-per-node=4", "t.py"))


@pytest.mark.parametrize(
    ("time", "limit", "signal"),
    [
        ("30s", "00:00:30", 15),
        ("90m", "01:30:00", 60),
        ("26h", "1-02:00:00", 60),
        ("2d", "2-00:00:00", 60),
        ("100:00:00", "4-04:00:00", 60),
        ("1-12:30:05", "1-12:30:05", 60),
    ],
)
def test_times_are_slurms(text, time, limit, signal):
    found = options_in(text("slurm", f"--time={time}", *SIZE, "t.py"))
    assert (found["time"], found["signal"]) == (limit, f"B:USR1@{signal}")


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0")).filter(lambda word: "\r\n" not in word),
        max_size=5,
    )
)
def test_the_shell_passes_every_argument_on(tmp_path_factory, arguments):
    try:
        [word.encode(errors="surrogateescape") for word in arguments]
    except UnicodeEncodeError:
        return
    body = text_of("slurm", "-x", "A=b c", *SIZE, "train.py", *arguments)
    expected = ["train", "--gpus-per-node=2", "--env=A=b c", "--requeue", "train.py", *arguments]
    decoded = [
        word.encode(errors="surrogateescape").decode(errors="surrogateescape") for word in expected
    ]
    assert words_of(body, tmp_path_factory.mktemp("words")) == decoded


def test_no_argument_becomes_an_option_of_sbatch(text):
    body = text("slurm", *SIZE, "train.py", "a\n#SBATCH --nodes=99\n")
    assert options_in(body)["nodes"] == "1"
