from __future__ import annotations

import pytest

from distlaunch.__main__ import run
from distlaunch.cli import parser
from distlaunch.cli.app import run_app
from distlaunch.core.errors import UsageError
from tests.facts import mentions


def through_app(command: str, words: list[str], environ: dict[str, str]):
    """Return the arguments with which the application calls the command."""
    seen = []

    def take(*parsed):
        seen.append(parsed[0] if len(parsed) == 1 else parsed)
        return 7

    assert run_app([command, *words], environ, train=take, plan=take) == 7
    return seen[0]


WORDS = [
    "-mxA=1",
    "--num_procs=2",
    "-o",
    "a=b",
    "--log-dir=",
    "--no-quiet",
    "--grace",
    "5m",
    "pkg.mod",
    "--",
    "-h",
    "",
    "\udcff",
]


def test_the_application_parses_train_and_plan_as_the_start_path_does():
    environ = {"DISTLAUNCH_QUIET": "1", "DISTLAUNCH_GRACE": "3"}
    words = [word for word in WORDS if word != "--log-dir="]
    assert through_app("train", words, environ) == parser.parse_train(words, environ)
    assert through_app("plan", words, environ) == parser.parse_plan(words, environ)
    for command, parse in (("train", parser.parse_train), ("plan", parser.parse_plan)):
        with pytest.raises(UsageError) as expected:
            parse(WORDS, environ)
        with pytest.raises(UsageError) as caught:
            through_app(command, WORDS, environ)
        assert (caught.value.message, caught.value.hint) == (
            expected.value.message,
            expected.value.hint,
        )


def test_a_local_rank_that_another_launcher_has_added_is_led_to_how_it_is_left_out():
    with pytest.raises(UsageError) as caught:
        run_app(["--local_rank=0", "train", "x.py"], {})
    assert (caught.value.hint or "").startswith("deepspeed --no_local_rank")


@pytest.mark.parametrize(
    "words", [[], ["train"], ["render", "slurm"], ["backends"], ["help"], ["torchrun"]], ids=str
)
def test_the_application_shows_the_same_help_as_the_start_path(words, capsys):
    assert run_app([*words, "--help"], {}) == 0
    shown = capsys.readouterr().out
    assert run([*words, "--help"], {}) == 0
    assert capsys.readouterr().out == shown != ""


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "did you mean train?"),
        ("plans", "did you mean plan?"),
        ("cancel", "distlaunch stop JOB stops a job; distlaunch ps lists them"),
        ("ls", "distlaunch ps --all lists the jobs"),
        ("tail", "distlaunch logs JOB --follow shows the output of a job"),
        (
            "bin/accelerate",
            "distlaunch accelerate launch [OPTIONS] SCRIPT [ARGS]... takes a command line of accelerate launch",
        ),
        (
            "xyz",
            "there are train, plan, torchrun, torch.distributed.launch, deepspeed, horovodrun, backends, ps, status, logs, events, report, top, stack, attach, wait, stop, rm, help, version, completion, accelerate, render",
        ),
    ],
)
def test_a_command_that_does_not_exist_is_answered_with_the_nearest(word, hint):
    with pytest.raises(UsageError) as caught:
        run_app([word, "x"], {})
    assert mentions(caught.value.message, f"'{word}'")
    assert caught.value.hint == hint


def test_an_option_that_the_root_does_not_have_is_an_error_of_ours():
    with pytest.raises(UsageError, match="--nothing"):
        run_app(["--nothing"], {})


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (["backends", "--nothing"], "distlaunch backends"),
        (["--nothing"], "distlaunch"),
        (["render", "--nothing"], "distlaunch render"),
    ],
    ids=str,
)
def test_a_hint_leads_to_the_page_of_its_command(words, page):
    with pytest.raises(UsageError) as caught:
        run_app(words, {})
    assert caught.value.hint == f"see {page} --help"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["--standalone", "s.py"],
            "distlaunch train [OPTIONS] SCRIPT; not needed here: one machine",
        ),
        (["--nproc_per_node=2", "s.py"], "distlaunch train [OPTIONS] SCRIPT; --gpus-per-node N"),
        (["s.py"], "distlaunch train s.py"),
    ],
)
def test_a_command_line_of_torchrun_is_led_to_train(words, hint):
    with pytest.raises(UsageError) as caught:
        run_app(words, {})
    assert (caught.value.hint or "").startswith(hint)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["python", "-m", "torch.distributed.run", "x.py"], "distlaunch torchrun"),
        (
            ["/usr/bin/python3", "-u", "-m", "torch.distributed.launch", "x.py"],
            "distlaunch torch.distributed.launch",
        ),
        (["/venv/bin/torchrun", "x.py"], "distlaunch torchrun"),
        (["python3", "x.py"], "distlaunch train"),
        (["run", "x.py"], "distlaunch train"),
        (["x.py"], "distlaunch train x.py"),
        (["trian", "x.py"], "did you mean train?"),
        (["ray", "x.py"], "distlaunch train --backend ray [--address HOST:PORT] SCRIPT [ARGS]..."),
        (["fsdp", "x.py"], "distlaunch train --backend fsdp SCRIPT [ARGS]..."),
        (["TF", "x.py"], "distlaunch train --backend tensorflow SCRIPT [ARGS]..."),
        (["horovod", "x.py"], "distlaunch train --backend horovod SCRIPT [ARGS]..."),
        (["--num-procs", "2", "x.py"], "distlaunch train --num-procs ... SCRIPT [ARGS]..."),
        (["--num_gpus=2", "x.py"], "distlaunch train --num-gpus ... SCRIPT [ARGS]..."),
        (["-m", "x"], "distlaunch train -m ... SCRIPT [ARGS]..."),
    ],
    ids=str,
)
def test_words_of_other_launchers_lead_to_the_command_that_takes_them(words, hint):
    with pytest.raises(UsageError) as caught:
        run_app(words, {})
    assert hint in (caught.value.hint or "")
