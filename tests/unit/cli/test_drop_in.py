"""Common parts of the commands that take another launcher's options."""

from __future__ import annotations

from importlib import import_module

import pytest

from distlaunch.cli.compat.drop_in import with_option_names
from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.cli.parser import scan, whole_name
from distlaunch.core.agent.connect import RejectedError
from distlaunch.core.errors import ConfigError, LaunchError, UsageError
from distlaunch.core.protocol.launcher_messages import Rejected
from distlaunch.planning.train_options import Dialect

DIALECT = Dialect(spelling=(("--job-id", "--rdzv-id"), ("--num-procs", "-np")))


@pytest.mark.parametrize(
    "error",
    [
        RejectedError(
            "no --job-id", Rejected(text="", hint="by --num-procs", exit_code=69, again=False)
        ),
        ConfigError("no --job-id", hint="by --num-procs"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_put_into_other_words_and_stays_what_it_is(error):
    code = error.exit_code
    with pytest.raises(LaunchError) as caught, with_option_names(DIALECT):
        raise error
    assert caught.value is error
    assert (error.message, str(error), error.hint, error.exit_code) == (
        "no --rdzv-id",
        "no --rdzv-id",
        "by -np",
        code,
    )


def test_other_errors_pass_as_they_are():
    with pytest.raises(ValueError, match="--job-id"), with_option_names(DIALECT):
        raise ValueError("--job-id")


def test_abbreviated_options_are_completed_up_to_the_script():
    words = ["--num_no", "2", "--hostf=--num_no", "--quiet", "s.py", "--num_no"]
    given, rest = scan(words, TRAIN_OPTIONS, abbreviated=TRAIN_OPTIONS)
    assert given == {"num_nodes": ["2"], "hostfile": ["--num_no"], "quiet": ["1"]}
    assert rest == ("s.py", "--num_no")


@pytest.mark.parametrize(
    ("words", "without"),
    [
        (["s.py", "--", "--lr", "1"], ["s.py", "--lr", "1"]),
        (["--quiet", "s.py", "--", "--", "x"], ["s.py", "--", "x"]),
        (["s.py", "--a", "--", "--b"], ["s.py", "--a", "--", "--b"]),
        (["--", "s.py", "--", "a"], ["s.py", "--", "a"]),
        (["s.py", "--"], ["s.py"]),
        (["s.py"], ["s.py"]),
        ([], []),
    ],
)
def test_one_pair_of_dashes_directly_behind_the_script_is_dropped_where_the_other_launcher_does(
    words, without
):
    assert scan(words, TRAIN_OPTIONS, drops_dashes=True)[1] == tuple(without)
    kept = words[1:] if words[:1] in (["--"], ["--quiet"]) else words
    assert scan(words, TRAIN_OPTIONS)[1] == tuple(kept)


def test_a_beginning_of_several_names_is_refused_unless_they_are_one_options():
    fields = {
        "--num-gpus": "num_gpus",
        "--num-gpu-cards": "num_gpus",
        "--num-nodes": "num_nodes",
        "--home": "home",
    }
    assert whole_name("--num_g", fields) == "--num-gpus"
    assert whole_name("--nim", fields) == "--nim"
    assert whole_name("--hel", fields) == "--help"
    with pytest.raises(
        UsageError,
        match=r"'--n' .* --num-gpus, --num-gpu-cards, --n",
    ):
        whole_name("--n", fields)
    with pytest.raises(UsageError, match="--home, --help"):
        whole_name("--h", fields)


def test_a_value_behind_joined_letters_loses_the_equals_sign():
    options = import_module("distlaunch.cli.compat.deepspeed.options").OPTIONS
    given, rest = scan(["-qH=hosts", "-m", "pkg.mod"], options)
    assert given == {"quiet": ["1"], "hostfile": ["hosts"], "module": ["1"]}
    assert rest == ("pkg.mod",)


def test_a_value_behind_a_switch_of_one_letter_is_refused_and_not_taken_for_the_script():
    options = import_module("distlaunch.cli.compat.deepspeed.options").OPTIONS
    with pytest.raises(UsageError, match=r"-m .* '1'"):
        scan(["-m=1", "s.py"], options)


@pytest.mark.parametrize("name", ["deepspeed", "horovodrun"])
def test_options_of_other_backends_are_not_those_of_a_launcher_with_its_own(name):
    fields = [
        option.field for option in import_module(f"distlaunch.cli.compat.{name}.options").OPTIONS
    ]
    assert not {"backend", "address"} & set(fields)
    assert len(fields) == len(set(fields))


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "deepspeed", "horovodrun"])
def test_replacements_of_train_options_are_options_or_variables_there(name):
    rows = import_module(f"distlaunch.cli.compat.{name}.options").OPTIONS
    flags = {flag.replace("_", "-") for option in rows for flag in option.flags}
    for option in TRAIN_OPTIONS:
        absence = option.absent.get(name)
        if absence is not None and absence.instead:
            names = [word for word in absence.instead.split() if word[0] == "-"]
            assert all(word.replace("_", "-") in flags for word in names), absence
            assert names or absence.instead.isupper()


def test_every_reason_for_which_an_option_does_not_apply_can_follow_a_colon():
    for option in TRAIN_OPTIONS:
        for absence in option.absent.values():
            assert absence.why
            assert not absence.why.endswith(".")
