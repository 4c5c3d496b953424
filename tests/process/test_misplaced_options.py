"""Options of ours behind SCRIPT: a script that ignores unknown arguments swallows them."""

from __future__ import annotations

import pytest

from tests.facts import mentions

SWALLOWS = "import argparse\nparser = argparse.ArgumentParser()\nparser.parse_known_args()\n"
NOTICE = "behind SCRIPT went to the script, and the text of train.py has no such name"


@pytest.fixture
def notices_of(distlaunch):
    """Return a function that runs a command line with a script of this text, and returns the
    notices about misplaced options."""

    def run(*words: str, source: str = SWALLOWS, env: dict[str, str] | None = None) -> list[str]:
        (distlaunch.work / "train.py").write_text(source)
        distlaunch.pretend("deepspeed")
        result = distlaunch.run([*words], env=env)
        assert result.returncode == 0, result.stderr
        return [line for line in result.stderr.splitlines() if "behind SCRIPT" in line]

    return run


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "train.py", "--num-procs", "4"], "--num-procs"),
        (
            ["train", "train.py", "--lr", "1", "--max_restarts=3", "--num-procs", "2"],
            "--max_restarts and --num-procs",
        ),
        (["train", "-m", "train", "--num-procs", "4"], "--num-procs"),
        (["torchrun", "train.py", "--nproc_per_node", "4"], "--nproc_per_node"),
        (["deepspeed", "--no_local_rank", "train.py", "--num_gpus", "4"], "--num_gpus"),
        (["accelerate", "launch", "--cpu", "train.py", "--num_processes=4"], "--num_processes"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_options_of_ours_that_the_scripts_text_does_not_have_are_named_in_one_notice(
    notices_of, words, named
):
    (line,) = notices_of(*words)
    text = NOTICE if "-m" not in words else NOTICE.replace("train.py", "train")
    assert mentions(line, "warning", named, text, "SCRIPT")


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (["train", "train.py", "--lr", "1", "-x", "--"], SWALLOWS),
        (
            ["train", "train.py", "--num-procs", "4"],
            SWALLOWS + "parser.add_argument('--num-procs')\n",
        ),
        (["train", "train.py", "--num-procs", "4"], SWALLOWS + "num_procs: int = 1\n"),
        (["train", "--quiet", "train.py", "--num-procs", "4"], SWALLOWS),
        (["train", "--no-python", "true", "--num-procs", "4"], SWALLOWS),
        (["train", "--num-procs", "2", "train.py", "4"], SWALLOWS),
    ],
)
def test_a_scripts_own_arguments_are_no_ones_business(notices_of, words, source):
    assert notices_of(*words, source=source) == []


def test_plan_shows_it_too(notices_of):
    assert len(notices_of("plan", "train.py", "--num-procs", "4")) == 1
