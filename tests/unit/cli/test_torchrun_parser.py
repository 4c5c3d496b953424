"""The words of ``distlaunch torchrun`` are parsed as torchrun 2.13 does, except where it refuses
clear input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.cli.compat.torchrun.command_line import misspelt_variables, parse
from distlaunch.cli.compat.torchrun.options import BY_VARIABLE, OPTIONS
from distlaunch.cli.help import help_text
from distlaunch.cli.parser import HelpRequested
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.variables import SET_FOR_WORKERS
from tests.facts import mentions

OF_TORCHRUN_2_13 = """
    --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --max-restarts
    --monitor-interval --start-method --event-log-handler --role -m --module --no-python --run-path --log-dir -r
    --redirects -t --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank
    --master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout
    --virtual-local-rank
"""


def values(
    *words: str, environ: dict[str, str] | None = None, **wanted: object
) -> dict[str, object]:
    parsed = parse([*words, "s.py"], environ or {})
    assert (parsed.script, parsed.script_args) == ("s.py", ())
    return {name: parsed.values[name] for name in wanted} if wanted else dict(parsed.values)


def refused(*words: str, environ: dict[str, str] | None = None) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse(words, environ or {})
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    return caught.value.message, caught.value.hint or ""


def test_every_option_of_torchrun_is_there_and_no_name_twice():
    flags = [flag for option in OPTIONS for flag in option.flags]
    assert set(flags) - {"--log-line-prefix-template", "--use-env"} == set(OF_TORCHRUN_2_13.split())
    assert len(flags) == len(set(flags))
    assert not {option.variable for option in OPTIONS} & SET_FOR_WORKERS


def test_the_names_are_those_that_the_installed_torchrun_takes():
    from torch.distributed.run import get_args_parser

    command_options = {
        flag for action in get_args_parser()._actions for flag in action.option_strings
    }
    assert {flag.replace("_", "-") for flag in command_options} - {"-h", "--help"} <= {
        f for o in OPTIONS for f in o.flags
    }


def test_defaults_are_torchruns():
    found = values()
    assert found["nnodes"] == (1, 1)
    assert found["nproc_per_node"] == 1
    assert found["rdzv_backend"] == "static"
    assert found["max_restarts"] == 0
    assert found["redirects"] == found["tee"] == 0
    assert found["role"] == "default"
    assert (
        found["master_port"]
        is found["rdzv_id"]
        is found["log_dir"]
        is found["shutdown_timeout"]
        is None
    )
    assert found["module"] is found["standalone"] is False


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node", "4"],
        ["--nproc-per-node=4"],
        ["--nproc_per_node", "4"],
        ["--nproc_per_node=4"],
        ["--nproc-per_node=4"],
        ["--nproc=4"],
        ["--np", "4"],
        ["--nproc-per-node=2", "--nproc_per_node=4"],
    ],
    ids=" ".join,
)
def test_dash_underscore_one_word_or_two_and_beginnings_mean_the_same(words):
    assert values(*words)["nproc_per_node"] == 4


@pytest.mark.parametrize(
    ("words", "module", "redirects", "tee"),
    [
        (["-m"], True, 0, 0),
        (["-r3"], False, 3, 0),
        (["-r", "3"], False, 3, 0),
        (["-r=3"], False, 3, 0),
        (["-mr3"], True, 3, 0),
        (["-mr", "1", "-t2"], True, 1, 2),
        (["-t", "0:3,12:1"], False, 0, {0: 3, 12: 1}),
        (["--redirects=12:3"], False, {12: 3}, 0),
    ],
    ids=str,
)
def test_short_flags_may_be_joined_and_carry_their_value(words, module, redirects, tee):
    found = values(*words)
    assert (found["module"], found["redirects"], found["tee"]) == (module, redirects, tee)


@pytest.mark.parametrize(
    ("words", "script", "rest"),
    [
        (["main.py", "--r=16"], "main.py", ["--r=16"]),
        (
            ["main.py", "--nnodes", "9", "-m", "-h", "--help"],
            "main.py",
            ["--nnodes", "9", "-m", "-h", "--help"],
        ),
        (["--", "main.py", "--", "a"], "main.py", ["--", "a"]),
        (["--nnodes=1", "--", "--odd-name.py"], "--odd-name.py", []),
        (["main.py", "--", "--x"], "main.py", ["--x"]),
        (["main.py", "--", "--", "x"], "main.py", ["--", "x"]),
        (["main.py", "--"], "main.py", []),
        (["main.py", "--a", "--", "--b"], "main.py", ["--a", "--", "--b"]),
        (["-m", "pkg.mod", "--", "x"], "pkg.mod", ["x"]),
        (["-m", "pkg.mod", "-t", "9", ""], "pkg.mod", ["-t", "9", ""]),
        (
            ["main.py", "two words", "Ü", "\udcff", "$$"],
            "main.py",
            ["two words", "Ü", "\udcff", "$$"],
        ),
    ],
    ids=str,
)
def test_words_after_the_script_are_the_scripts(words, script, rest):
    parsed = parse(words, {})
    assert (parsed.script, list(parsed.script_args)) == (script, rest)


@given(st.lists(st.text()))
def test_any_words_after_the_script_come_through(words: list[str]):
    expected = words[1:] if words[:1] == ["--"] else words
    assert parse(["--nnodes", "1", "s.py", *words], {}).script_args == tuple(expected)
    assert parse(["--nnodes", "1", "--", "s.py", *words], {}).script_args == tuple(words)


@given(st.lists(st.text(max_size=12)))
def test_any_words_at_all_are_parsed_or_refused_in_one_line(words: list[str]):
    shown = ""
    try:
        parse(words, {})
    except HelpRequested:
        pass
    except ConfigError as error:
        shown = error.message + (error.hint or "")
    assert shown.isprintable()


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ([], "SCRIPT is missing", "distlaunch torchrun"),
        ([""], "SCRIPT is an empty word", ""),
        (["--nproc-per-node=two", "s"], "--nproc-per-node takes a whole number", ""),
        (["--nproc-per-node=cuda", "s"], "--nproc-per-node takes", "gpu counts CUDA"),
        (["--nproc-per-node=0", "s"], "--nproc-per-node takes a whole number from 1", ""),
        (["--nnodes=x", "s"], "--nnodes takes N or MIN:MAX", ""),
        (["--nnodes=3:2", "s"], "--nnodes takes MIN:MAX with", ""),
        (["--nnodes=0", "s"], "--nnodes takes MIN:MAX with", ""),
        (["--tee=4", "s"], "--tee takes 0 (neither)", ""),
        (["-t", "1:3,", "s"], "--tee takes 0 (neither)", ""),
        (["--local-ranks-filter=0,x", "s"], "--local-ranks-filter takes local ranks", ""),
        (["--max-restarts=-1", "s"], "--max-restarts takes a whole number from 0", ""),
        (["--max-restarts", "-1", "s"], "--max-restarts takes a whole number from 0", ""),
        (["--master-port=70000", "s"], "--master-port takes a whole number", ""),
        (["--monitor-interval=nan", "s"], "--monitor-interval takes a number", ""),
        (["--start-method=thread", "s"], "--start-method takes spawn, fork or forkserver", ""),
        (["--standalone=1", "s"], "--standalone takes no value", ""),
        (["-m=1", "s"], "-m takes no value", ""),
        (["--log-dir"], "--log-dir needs a value", ""),
        (["--log-dir", "--tee", "3", "s"], "--log-dir needs a value", "write --log-dir=--tee"),
        (["--no", "s"], "'--no' is the beginning of several options: --no-python, --node-rank", ""),
        (
            ["--nprocs-per-node=2", "s"],
            "unknown option '--nprocs-per-node'",
            "did you mean --nproc-per-node?",
        ),
        (
            ["-nproc_per_node=2", "s"],
            "unknown option '-nproc_per_node=2'",
            "did you mean --nproc-per-node?",
        ),
        (
            ["--preload", "torch", "s"],
            "unknown option '--preload'",
            "the variable DISTLAUNCH_PRELOAD",
        ),
        (["--num-gpus", "2", "s"], "unknown option '--num-gpus'", "here it is --nproc-per-node"),
        (
            ["--backend", "fsdp", "s"],
            "unknown option '--backend'",
            "distlaunch train --backend NAME",
        ),
        (["--dry-run", "s"], "unknown option '--dry-run'", "distlaunch train"),
        (["-x", "s"], "unknown option '-x'", "options of the script go after SCRIPT"),
    ],
    ids=str,
)
def test_bad_words_are_answered_with_one_line_and_what_to_do(words, message, hint):
    shown, advice = refused(*words)
    assert shown.startswith(message)
    assert hint in advice


@pytest.mark.parametrize(
    "words", [["--help"], ["-h"], ["-mh", "s"], ["--nnodes=1", "--he", "s.py"]], ids=" ".join
)
def test_help_is_asked_for_before_the_script_only(words):
    with pytest.raises(HelpRequested):
        parse(words, {})


# --- PET_ variables


def test_defaults_come_from_pet_variables_and_the_command_line_wins():
    environ = {
        "PET_NPROC_PER_NODE": "3",
        "PET_STANDALONE": "true",
        "PET_RDZV_ID": "x",
        "PET_TEE": "",
    }
    found = parse(["--nproc-per-node=2", "s.py"], environ)
    assert found.values["nproc_per_node"] == 2
    assert found.values["standalone"] is True
    assert found.values["rdzv_id"] == "x"
    assert found.values["tee"] == 0, "an empty one is none"
    assert [option.name for option in found.given] == ["--nproc-per-node"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        ("on", True),
        ("0", False),
        ("False", False),
        ("no", False),
        ("off", False),
    ],
)
def test_a_switch_takes_the_words_that_people_write(text, value):
    assert parse(["s.py"], {"PET_NO_PYTHON": text}).values["no_python"] is value


def test_a_bad_variable_is_named():
    assert refused("s.py", environ={"PET_STANDALONE": "maybe"})[0].startswith("PET_STANDALONE ")
    assert refused("s.py", environ={"PET_NNODES": "a"})[0].startswith("PET_NNODES ")
    assert not isinstance(_error({"PET_NNODES": "a"}), UsageError)


def _error(environ: dict[str, str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(["s.py"], environ)
    return caught.value


def test_a_misspelt_variable_is_reported_and_a_strange_one_is_not():
    reported = misspelt_variables({"PET_NPROC_PERNODE": "2", "PET_NAME": "Rex", "PET_NNODES": "1"})
    assert len(reported) == 1
    assert mentions(reported, "'PET_NPROC_PERNODE'", "PET_NPROC_PER_NODE")


def test_filters_split_at_commas_and_a_double_comma_is_one():
    assert values("--duplicate-stdout-filters=apple,a,,b,")["duplicate_stdout_filters"] == (
        "apple",
        "a,b",
    )


# --- help


@pytest.mark.parametrize("columns", [20, 80, 300])
def test_help_lists_every_option_and_the_variables_of_ours(columns):
    text = help_text(["torchrun"], columns)
    assert max(map(len, text.splitlines())) <= max(60, min(columns, 100))
    for option in OPTIONS:
        assert f"  {', '.join(option.flags)}" in text
    assert "DISTLAUNCH_PRELOAD" in text
    assert "distlaunch help from-torchrun" in " ".join(text.split())


def test_options_of_train_that_work_by_a_variable_have_one():
    assert BY_VARIABLE
    assert all(option.variable for option in BY_VARIABLE)


@pytest.mark.parametrize(
    "option", ["--local-ranks-filter", "--nnodes", "--nproc-per-node", "--max-restarts"]
)
def test_a_number_of_any_length_is_refused_in_one_line(option):
    with pytest.raises(UsageError, match="takes "):
        parse([option, "9" * 5000, "s.py"], {})


def test_no_digit_of_a_number_is_cut_off():
    for words in (
        ["--tee", "1000000000001:3"],
        ["--nnodes", "1:1000000000001"],
        ["--nnodes", f"{10**12}1"],
    ):
        with pytest.raises(UsageError, match="takes "):
            parse([*words, "s.py"], {})
    assert parse(["--tee", "000000000000012:3", "s.py"], {}).values["tee"] == {12: 3}
