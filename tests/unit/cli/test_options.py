from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.cli.option import convert, read_choice
from distlaunch.cli.option_table import GROUP_TITLES, HELP_FLAGS, PLAN_OPTIONS, TRAIN_OPTIONS
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.record import fields_of
from distlaunch.core.model.variables import SET_FOR_WORKERS, without_outer_launchers
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions

BY_NAME = {option.name: option for option in TRAIN_OPTIONS}

OPTION_VARIABLES = {option.variable for option in TRAIN_OPTIONS if option.variable}


def test_every_field_that_is_an_option_has_exactly_one_row():
    others = {"script_args", "given", "whole_nodes", "whole_gpus"}
    fields = [field for field in fields_of(TrainOptions) if field not in others]
    assert sorted(option.field for option in TRAIN_OPTIONS) == sorted(fields)


def test_no_flag_and_no_variable_is_used_twice():
    flags = [flag for option in TRAIN_OPTIONS for flag in option.all_flags]
    variables = [option.variable for option in TRAIN_OPTIONS if option.variable]
    assert len(flags) == len(set(flags))
    assert len(variables) == len(set(variables))
    assert not set(flags) & set(HELP_FLAGS)


def test_plan_has_the_options_of_train_and_a_format_of_its_own():
    assert {option.field for option in PLAN_OPTIONS} ^ {
        option.field for option in TRAIN_OPTIONS
    } == {
        "format",
        "plan_format",
        "expand",
    }
    flags = [flag for option in PLAN_OPTIONS for flag in option.all_flags]
    assert len(flags) == len(set(flags))


def test_no_variable_that_workers_get_is_read_as_a_default():
    assert not OPTION_VARIABLES & SET_FOR_WORKERS


def test_no_variable_of_an_option_reaches_workers():
    assert OPTION_VARIABLES
    assert without_outer_launchers(dict.fromkeys(OPTION_VARIABLES, "1")) == {}


def test_every_option_but_what_runs_detach_and_dry_run_has_a_variable_named_after_it():
    without = {option.field for option in TRAIN_OPTIONS if option.variable is None}
    assert without == {"script", "module", "no_python", "detach", "dry_run"}
    odd = {"job_id": "DISTLAUNCH_TRAIN_JOB_ID", "backend": "DISTLAUNCH_TRAIN_BACKEND"}
    for option in TRAIN_OPTIONS:
        if option.variable is not None:
            assert option.variable == odd.get(
                option.field, "DISTLAUNCH_" + option.name[2:].replace("-", "_").upper()
            )


def test_every_switch_that_a_variable_can_set_has_a_flag_that_undoes_it():
    negations = {option.negation for option in TRAIN_OPTIONS} - {None}
    assert negations == {
        "--no-quiet",
        "--no-isolate-gpus",
        "--no-spread",
        "--no-explain",
        "--no-forward-env",
        "--no-requeue",
        "--no-weak-token-ok",
    }
    assert all(
        option.kind == "flag" and option.variable for option in TRAIN_OPTIONS if option.negation
    )


def test_choices_are_those_of_the_field_type():
    hints = get_type_hints(TrainOptions)
    for option in TRAIN_OPTIONS:
        if option.kind == "choice":
            parts = [hints[option.field], *get_args(hints[option.field])]
            literal = next(part for part in parts if get_origin(part) is Literal)
            assert option.choices == get_args(literal)


def test_every_row_can_be_explained():
    for option in TRAIN_OPTIONS:
        assert option.help.endswith(".")
        assert option.group in GROUP_TITLES
        assert bool(option.metavar) == (option.kind != "flag")
        assert option.name.startswith("--")
        assert "_" not in option.name


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("--num-gpus", "4", 4),
        ("--num-gpus", "auto", "auto"),
        ("--num-procs", "1000000", 1_000_000),
        ("--num-procs", "0008", 8),
        ("--max-restarts", "0", 0),
        ("--master-port", "65535", 65535),
        ("--grace", "30", 30.0),
        ("--grace", "0", 0.0),
        ("--grace", "2.5", 2.5),
        ("--grace", ".5s", 0.5),
        ("--grace", "30s", 30.0),
        ("--grace", "5m", 300.0),
        ("--restart-window", "2h", 7200.0),
        ("--hang-timeout", "10min", 600.0),
        ("--backend", "PyTorch_DDP", "pytorch-ddp"),
        ("--backend", "my_Backend", "my_Backend"),
        ("--restart-delay", "8", (8.0, 8.0)),
        ("--restart-delay", "0", (0.0, 0.0)),
        ("--restart-delay", "8:60", (8.0, 60.0)),
        ("--restart-delay", "1.5s:5m", (1.5, 300.0)),
        ("--device", "cpu", "cpu"),
        ("--workdir", "a\udcff b", "a\udcff b"),
        ("--num-nodes", "4", 4),
        ("--num-nodes", "2:4", (2, 4)),
        ("--num-nodes", "4:4", 4),
        ("--node-rank", "0", 0),
    ],
)
def test_values_are_read(name: str, text: str, value: object):
    assert convert(BY_NAME[name], text, name) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("--num-gpus", "four", "--num-gpus takes a whole number >= 1 or 'auto', not 'four'"),
        ("--num-gpus", "0", "--num-gpus takes a whole number >= 1 or 'auto', not '0'"),
        ("--num-procs", "-1", "--num-procs takes a whole number >= 1, not '-1'"),
        (
            "--restart-delay",
            "x",
            "--restart-delay takes a time >= 0 like 30, 2.5, 30s, 5m or 2h or S:MAX, not 'x'",
        ),
        (
            "--restart-delay",
            "8:",
            "--restart-delay takes a time >= 0 like 30, 2.5, 30s, 5m or 2h on both sides of S:MAX, not ''",
        ),
        ("--restart-delay", "60:8", "--restart-delay takes S:MAX with 0 < S <= MAX, not '60:8'"),
        ("--restart-delay", "0:8", "--restart-delay takes S:MAX with 0 < S <= MAX, not '0:8'"),
        ("--num-procs", "1_0", "--num-procs takes a whole number >= 1, not '1_0'"),
        ("--num-procs", "٤", "--num-procs takes a whole number >= 1, not '٤'"),
        ("--num-procs", "auto", "--num-procs takes a whole number >= 1, not 'auto'"),
        (
            "--num-procs",
            "1000001",
            "--num-procs takes a whole number of at most 1000000, not '1000001'",
        ),
        ("--max-restarts", "1.5", "--max-restarts takes a whole number >= 0, not '1.5'"),
        (
            "--master-port",
            "65536",
            "--master-port takes a whole number of at most 65535, not '65536'",
        ),
        ("--grace", "nan", "--grace takes a time >= 0 like 30, 2.5, 30s, 5m or 2h, not 'nan'"),
        ("--grace", "inf", "--grace takes a time >= 0 like 30, 2.5, 30s, 5m or 2h, not 'inf'"),
        ("--grace", "-1s", "--grace takes a time >= 0 like 30, 2.5, 30s, 5m or 2h, not '-1s'"),
        ("--grace", "s", "--grace takes a time >= 0 like 30, 2.5, 30s, 5m or 2h, not 's'"),
        (
            "--grace",
            "9" * 60,
            "--grace takes a time of at most 1000000000 seconds, not '" + "9" * 60 + "'",
        ),
        ("--hang-timeout", "0", "--hang-timeout takes a time of at least 1.5 seconds, not '0'"),
        ("--hang-timeout", "1s", "--hang-timeout takes a time of at least 1.5 seconds, not '1s'"),
        ("--lost-after", "0", "--lost-after takes a time of at least 5 seconds, not '0'"),
        ("--join-timeout", "0", "--join-timeout takes a time of at least 0.1 seconds, not '0'"),
        ("--device", "gpu", "--device takes auto, cuda or cpu, not 'gpu'"),
        ("--num-nodes", "0", "--num-nodes takes a whole number >= 1 or MIN:MAX, not '0'"),
        (
            "--num-nodes",
            "2:",
            "--num-nodes takes a whole number >= 1 on both sides of MIN:MAX, not ''",
        ),
        (
            "--num-nodes",
            "2:3:4",
            "--num-nodes takes a whole number >= 1 on both sides of MIN:MAX, not '3:4'",
        ),
        ("--num-nodes", "4:2", "--num-nodes takes MIN:MAX, and in '4:2' the first is the larger"),
        ("--workdir", "", "--workdir needs a value (DIR), and got an empty one"),
    ],
)
def test_wrong_values_are_refused_with_what_would_be_right(name: str, text: str, message: str):
    with pytest.raises(UsageError) as caught:
        convert(BY_NAME[name], text, name)
    assert caught.value.message == message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "default"),
    [("--hang-timeout", "off"), ("--lost-after", "10 s"), ("--join-timeout", "60 s")],
)
def test_an_error_about_a_time_names_the_default(name: str, default: str):
    with pytest.raises(UsageError) as caught:
        convert(BY_NAME[name], "0", name)
    assert mentions(caught.value.hint, default)


def test_a_wrong_value_from_the_environment_names_the_variable_and_is_no_usage_error():
    with pytest.raises(ConfigError, match=r"^DISTLAUNCH_GRACE") as caught:
        convert(BY_NAME["--grace"], "soon", "DISTLAUNCH_GRACE")
    assert not isinstance(caught.value, UsageError)


@given(option=st.sampled_from(TRAIN_OPTIONS), text=st.text(st.characters()))
def test_any_text_gives_a_value_or_one_printable_line(option, text):
    message = ""
    try:
        convert(option, text, option.name)
    except UsageError as error:
        message = error.message
    assert message == "" or message.isprintable()
    assert len(message) < 250


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("markdown", "md"),
        ("js", "json"),
        ("JSN", "json"),
        ("htm", "html"),
        ("yaml", None),
        ("", None),
        ("\x1b[31m", None),
    ],
)
def test_a_wrong_choice_names_the_nearest(text, near):
    with pytest.raises(UsageError) as caught:
        read_choice(text, ("html", "md", "json"), "--format")
    assert caught.value.hint == (None if near is None else f"did you mean {near}?")
