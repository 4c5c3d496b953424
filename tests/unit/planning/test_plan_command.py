from __future__ import annotations

import os

import pytest

from distlaunch.backends.base import Backend
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.topology import Node, Topology
from distlaunch.planning.build_plan import build_plan
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions
from tests.unit.planning.plans import plan, refused


def test_a_script_runs_under_our_interpreter(make_facts):
    assert plan(make_facts, script_args=("--lr", "1 2", "")).argv == (
        "/usr/bin/python3",
        "train.py",
        "--lr",
        "1 2",
        "",
    )


def test_a_module_is_not_looked_for(make_facts):
    planned = plan(make_facts, script="pkg.train", module=True, script_args=("x",))
    assert planned.argv == ("/usr/bin/python3", "-m", "pkg.train", "x")
    assert not planned.signal_group


def test_another_interpreter(make_facts):
    facts = {"programs": {"python3.10": "/opt/bin/python3.10"}}
    assert plan(make_facts, facts=facts, python="python3.10").argv == ("python3.10", "train.py")
    error = refused(make_facts, facts={"programs": {"nopy": None}}, python="nopy")
    assert mentions(error.message, "--python nopy")


def test_without_python_the_program_itself_runs_and_its_group_is_signalled(make_facts):
    planned = plan(
        make_facts,
        facts={"programs": {"prog": "/bin/prog"}},
        script="prog",
        no_python=True,
        script_args=("-x",),
    )
    assert planned.argv == ("prog", "-x")
    assert planned.signal_group


def test_a_program_with_a_path_is_found_whereever_it_was_typed(make_facts):
    facts = {"programs": {"./prog": "/w/./prog"}}
    assert plan(make_facts, facts=facts, script="./prog", no_python=True).argv == ("/w/./prog",)


@pytest.mark.parametrize(
    ("name", "kind", "message", "hint"),
    [
        ("prog", "missing", "prog: no such command on PATH", None),
        ("./prog", "missing", "./prog: there is no such file", None),
        ("./prog", "directory", "./prog: is a directory, a file is needed", None),
        ("./prog", "file", "./prog: is not executable", "chmod +x ./prog"),
    ],
)
def test_programs_that_cannot_run(make_facts, name, kind, message, hint):
    facts = {"programs": {name: None}, "paths": {"/w/./prog": kind}}
    error = refused(make_facts, facts=facts, script=name, no_python=True)
    assert (error.message, error.hint) == (message, hint)


def test_setup_runs_in_a_login_shell_before_the_unchanged_command(make_facts):
    planned = plan(make_facts, setup="module load; export X='1 2'", script_args=("a b", "$HOME"))
    assert planned.argv[:3] == ("bash", "-l", "-c")
    assert planned.argv[-5:] == (
        "module load; export X='1 2'",
        "/usr/bin/python3",
        "train.py",
        "a b",
        "$HOME",
    )


def test_no_script_is_a_usage_error(make_facts):
    with pytest.raises(UsageError, match="SCRIPT") as caught:
        plan(make_facts, script=None)
    assert "distlaunch train" in caught.value.hint


@pytest.mark.parametrize("script", ["python", "python3.12", "/usr/lib/python3"])
def test_python_in_front_of_the_script_is_to_be_left_out(make_facts, script):
    place = os.path.join("/w", script)
    error = refused(make_facts, facts={"paths": {place: "missing"}}, script=script)
    assert mentions(error.message, script)
    assert mentions(error.hint, "SCRIPT", "Python")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "gone.py: there is no such file"),
        ("unreadable", "gone.py: not readable by this user"),
        ("directory", "gone.py: is a directory, a file is needed"),
    ],
)
def test_a_script_that_cannot_run(make_facts, kind, message):
    error = refused(make_facts, facts={"paths": {"/w/gone.py": kind}}, script="gone.py")
    assert error.message == message
    assert (error.hint == "looked in /w") == (kind == "missing")


def test_names_with_control_characters_do_not_reach_the_screen_as_they_are(make_facts):
    assert "\x1b" not in refused(make_facts, script="a\x1b[31m\nb.py").message


def test_a_directory_with_a_main_module_runs(make_facts):
    facts = {"paths": {"/w/app": "directory", "/w/app/__main__.py": "file"}}
    assert plan(make_facts, facts=facts, script="app").argv == ("/usr/bin/python3", "app")


# --- the working directory


def test_the_working_directory_is_where_the_command_was_typed(make_facts):
    assert plan(make_facts).workdir == "/w"


def test_a_script_is_looked_for_in_the_working_directory_first(make_facts):
    facts = {"paths": {"/w/sub": "directory", "/w/sub/train.py": "file"}}
    planned = plan(make_facts, facts=facts, workdir="sub")
    assert (planned.workdir, planned.argv) == ("/w/sub", ("/usr/bin/python3", "train.py"))


def test_a_script_that_is_only_where_the_command_was_typed_is_named_in_full(make_facts):
    planned = plan(make_facts, facts={"paths": {"/data": "directory"}}, workdir="/data")
    assert (planned.workdir, planned.argv) == ("/data", ("/usr/bin/python3", "/w/train.py"))


def test_an_error_about_a_missing_script_names_the_searched_paths(make_facts):
    error = refused(
        make_facts, facts={"paths": {"/data": "directory"}}, workdir="/data", script="gone.py"
    )
    assert error.hint == "looked in /data and /w"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "--workdir sub: there is no such directory"),
        ("file", "--workdir sub: is a file, a directory is needed"),
        ("unreadable", "--workdir sub: not readable by this user"),
    ],
)
def test_a_working_directory_that_is_none(make_facts, kind, message):
    assert refused(make_facts, facts={"paths": {"/w/sub": kind}}, workdir="sub").message == message


# --- words of the backend


class Worded(Backend):
    name = "worded"
    about = "gives each worker a word"

    def worker_words(self, local_rank: int) -> tuple[str, ...]:
        return (f"--local_rank={local_rank}",)


class AllWorded(Backend):
    name = "all-worded"
    about = "gives all workers a word"

    def script_words(self) -> tuple[str, ...]:
        return ("--config=c",)


def worded(make_facts, topology: Topology, backend: type[Backend] = Worded, **more) -> LaunchPlan:
    options = TrainOptions(script="train.py", script_args=("sub", "--lr=1"), num_procs=3, **more)
    return build_plan(
        options, make_facts(), topology, backend({}, {}), job_id="job-1", run_dir="/r/job-1"
    )


def test_a_backends_words_for_all_workers_are_in_their_command_and_they_can_be_forked(make_facts):
    topology = Topology(nodes=(Node(host="a", slots=2),), device="cpu")
    planned = worded(make_facts, topology, AllWorded, preload="json")
    assert planned.argv == (make_facts().python, "train.py", "--config=c", "sub", "--lr=1")
    assert [worker.argv for worker in planned.workers] == [None, None]
    with pytest.raises(ConfigError, match=r"--preload .* --local_rank"):
        worded(make_facts, topology, preload="json")


def test_a_backends_words_stand_before_the_scripts_own_and_after_each_nodes_own_interpreter(
    make_facts,
):
    elsewhere = Node(host="b", slots=1, argv=("/opt/python", "train.py", "sub", "--lr=1"))
    topology = Topology(nodes=(Node(host="a", slots=2), elsewhere), device="cpu")
    python = make_facts().python
    assert [worker.argv for worker in worded(make_facts, topology).workers] == [
        (python, "train.py", "--local_rank=0", "sub", "--lr=1"),
        (python, "train.py", "--local_rank=1", "sub", "--lr=1"),
        ("/opt/python", "train.py", "--local_rank=0", "sub", "--lr=1"),
    ]


def test_a_backends_arguments_match_local_rank_if_each_worker_sees_only_its_own_gpu(
    make_facts,
):
    masks = (("0",), ("1",))
    node = Node(
        host="a",
        slots=2,
        isolated=True,
        mask_variable="CUDA_VISIBLE_DEVICES",
        masks=masks,
        devices=("0", "1"),
    )
    planned = worded(make_facts, Topology(nodes=(node,), device="cuda"))
    assert [worker.argv[2] for worker in planned.workers] == ["--local_rank=0", "--local_rank=0"]
