from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.variables import DEVICE_MASKS, SET_FOR_WORKERS, without_outer_launchers
from distlaunch.planning.environment import (
    base_environment,
    check_total,
    given_environment,
    unless_set,
)
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions

OUTER = [
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NNODES", "TF_CONFIG",
    "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "MV2_COMM_WORLD_RANK", "DISTLAUNCH_MAX_RESTARTS", "DISTLAUNCH_JOB_ID",
    "JSM_NAMESPACE_RANK",
]  # fmt: skip
KEPT = [
    "PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_TIMELINE",
    "SLURM_JOB_ID", "OMP_NUM_THREADS", "RANKING", "MY_RANK", "TORCH_LOGS", "PMI",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTER)
def test_variables_of_an_outer_launcher_for_its_own_worker_are_dropped(make_facts, name):
    assert base_environment(make_facts(environ={name: "1", "A": "b"})) == {"A": "b"}


@pytest.mark.parametrize("name", KEPT)
def test_variables_of_the_user_are_inherited(make_facts, name):
    assert base_environment(make_facts(environ={name: "1"})) == {name: "1"}


@given(st.dictionaries(st.sampled_from([*OUTER, *KEPT]), st.text(max_size=3)))
def test_cleaning_twice_is_cleaning_once(environ):
    once = without_outer_launchers(environ)
    assert without_outer_launchers(once) == once
    assert not SET_FOR_WORKERS & once.keys()
    assert {name: environ[name] for name in KEPT if name in environ} == once


def given_by(make_facts, *env, files=None, environ=None) -> dict[str, str]:
    files = files or {}
    return given_environment(
        TrainOptions(env=env, env_file=tuple(files)), make_facts(environ=environ or {}, texts=files)
    )


def refused(make_facts, *env, files=None, environ=None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        given_by(make_facts, *env, files=files, environ=environ)
    assert "\n" not in caught.value.message
    return caught.value


def test_values_are_taken_as_they_are(make_facts):
    assert given_by(make_facts, "A=1", "B=", "C=x=y z", "_D1='q'") == {
        "A": "1",
        "B": "",
        "C": "x=y z",
        "_D1": "'q'",
    }


def test_a_bare_name_takes_the_value_from_here(make_facts):
    assert given_by(make_facts, "TOKEN", environ={"TOKEN": "abc"}) == {"TOKEN": "abc"}


def test_a_bare_name_that_is_not_set_is_refused_with_what_to_write(make_facts):
    error = refused(make_facts, "TOKEN")
    assert mentions(error.message, "--env TOKEN", "not set")
    assert mentions(error.hint, "--env TOKEN=VALUE")


def test_the_last_one_wins_and_options_win_over_files(make_facts):
    files = {"a.env": "A=1\nB=1\nC=1\n", "b.env": "B=2\nC=2\n"}
    assert given_by(make_facts, "C=3", "C=4", files=files) == {"A": "1", "B": "2", "C": "4"}


def test_a_file_may_have_comments_exports_quotes_and_blank_lines(make_facts):
    text = (
        "\ufeff# comment\n\n  A = 1 \nexport B=two words\nexport  C=\"x # y\"\nD='it''s'\nE=\"half\nF=\n"
        "G=a=b\r\nH=\"'in'\"\nI='\n"
    )
    assert given_by(make_facts, files={"e": text}) == {
        "A": "1",
        "B": "two words",
        "C": "x # y",
        "D": "it''s",
        "E": '"half',
        "F": "",
        "G": "a=b",
        "H": "'in'",
        "I": "'",
    }


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_only_newlines_end_a_line_of_a_file(make_facts, separator):
    assert given_by(make_facts, files={"e": f"A=x{separator}y\nB=1\n"}) == {
        "A": f"x{separator}y",
        "B": "1",
    }


def test_a_line_of_a_file_that_is_no_assignment_is_named(make_facts):
    assert refused(make_facts, files={"my.env": "A=1\n\nnonsense here\n"}).message == (
        "my.env:3: expected NAME=VALUE, found 'nonsense here'"
    )


def test_a_long_line_that_may_be_a_secret_is_not_printed_whole(make_facts):
    assert len(refused(make_facts, files={"e": "s" * 5000}).message) < 100


def test_a_value_that_no_variable_can_hold_is_refused(make_facts):
    error = refused(make_facts, files={"my.env": "A=1\nB=x\0y\n"})
    assert error.message.startswith("my.env:2: ")
    assert "NUL" in error.message


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "", "É", "A.B", "\uff41"])
def test_an_invalid_variable_name_is_refused(make_facts, name):
    for error in (
        refused(make_facts, f"{name}=1"),
        refused(make_facts, files={"e": f"{name}=1\n"}),
    ):
        assert repr(name)[1:-1] in error.message
        assert "digits" in error.hint
    assert refused(make_facts, files={"e": f"OK=1\n{name}=1\n"}).message.startswith("e:2: ")


@pytest.mark.parametrize(
    "name", ["RANK", "MASTER_PORT", "DISTLAUNCH_COOKIE", "TORCHELASTIC_ERROR_FILE"]
)
def test_variables_that_we_set_cannot_be_given(make_facts, name):
    assert mentions(refused(make_facts, f"{name}=1").message, f"--env {name}", name)
    assert refused(make_facts, name, environ={name: "1"}).message.startswith(f"--env {name}: ")
    assert refused(make_facts, files={"e": f"{name}=1\n"}).message.startswith("e:1: ")


@pytest.mark.parametrize("name", sorted(DEVICE_MASKS))
def test_devices_are_chosen_by_an_option_and_not_by_a_variable(make_facts, name):
    error = refused(make_facts, f"{name}=1")
    assert name in error.message
    assert "--gpus" in error.hint


def test_a_default_gives_way_to_every_layer():
    assert unless_set({"A": "1", "B": "1", "C": "1"}, {"A": ""}, {"C": "x"}) == {"B": "1"}


def test_all_variables_and_arguments_together_have_a_limit():
    environment = {"SHORT": "1", "LONG": "x" * 5_000}
    check_total(environment, ["python", "t.py"], 10_000)
    with pytest.raises(ConfigError, match=r"5,058 bytes, .* 5,056") as caught:
        check_total(environment, ["python", "t.py"], 5_056)
    assert mentions(caught.value.hint or "", "LONG")


def test_an_argument_among_the_longest_is_named_as_one():
    with pytest.raises(ConfigError) as caught:
        check_total({"SHORT": "1", "LONG": "x" * 500}, ["python", "y" * 5_000], 2_000)
    longest = f"the longest are the argument '{'y' * 77}'..., LONG, the argument 'python'; "
    assert str(caught.value.hint).startswith(longest)
