from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.__main__ import run
from distlaunch.cli import parser
from distlaunch.cli.app import run_app
from distlaunch.cli.commands.render import (
    ALL_OPTIONS,
    TARGETS,
    options_of,
    parse_render,
    render_file,
    spell,
)
from distlaunch.cli.option_table import GROUP_TITLES, HELP_FLAGS, TRAIN_OPTIONS
from distlaunch.core.errors import UsageError
from distlaunch.core.model.record import fields_of, replace
from distlaunch.render.request import RenderOptions
from tests.examples import examples
from tests.facts import mentions

OWN = [option for option in ALL_OPTIONS if option not in TRAIN_OPTIONS]
TEXTS = st.text(st.characters(exclude_characters="\0"), min_size=1)
NUMBERS = st.integers(1, 1000).map(str)
VALUES = {
    "backend": st.sampled_from(["pytorch-ddp", "ray", "Horovod", "mine_1"]),
    "text": TEXTS,
    "count": NUMBERS,
    "count or auto": st.one_of(NUMBERS, st.just("auto")),
    "count or range": st.sampled_from(["3", "2:4", "4:4"]),
    "whole": NUMBERS,
    "size": st.sampled_from(["64K", "256M", "2GiB", "1t", "123456789"]),
    "port": NUMBERS,
    "delay": st.sampled_from(["0", "0.25", "8", "8:60", "1.5:5m", "2h:2h"]),
    "seconds": st.one_of(
        NUMBERS.map(lambda number: f"{int(number) + 1}m"),
        st.floats(5, 1e9).map(lambda value: f"{value:.6f}"),
    ),
}


def spellings():
    """Return command lines of ``train`` with any options, and their environments."""

    def of(option):
        if option.kind == "flag":
            return st.sampled_from([flag for flag in (option.name, option.negation) if flag])
        values = st.sampled_from(option.choices) if option.kind == "choice" else VALUES[option.kind]
        return values.map(lambda value: f"{option.name}={value}")

    sizes = {"num_procs", "procs_per_node", "no_python", "script"}
    words = st.lists(
        st.one_of([of(option) for option in TRAIN_OPTIONS if option.field not in sizes]),
        max_size=8,
        unique_by=lambda word: word.partition("=")[0],
    )
    script = st.one_of(
        st.just(["t.py"]), st.lists(TEXTS, min_size=1, max_size=3).map(lambda words: ["--", *words])
    )
    return st.tuples(words, script).map(lambda parts: [*parts[0], *parts[1]])


@settings(deadline=None, max_examples=examples(50))
@given(spellings())
def test_options_that_are_spelled_again_are_the_same(words):
    options = parser.parse_train(words, {})
    spelled = [word for _, each in spell(options) for word in each]
    again = parser.parse_train([*spelled, "--", options.script, *options.script_args], {})
    assert replace(again, given={}) == replace(options, given={})


def test_a_value_of_a_variable_is_shown_with_the_variable_and_the_option_that_undoes_it():
    options = parser.parse_train(
        ["--no-forward-env", "--no-quiet", "t.py"],
        {"DISTLAUNCH_QUIET": "1", "DISTLAUNCH_NUM_NODES": "2:4"},
    )
    assert spell(options) == (
        ("num_nodes", ("--num-nodes=2:4",)),
        ("forward_env", ("--no-forward-env",)),
    )


def test_every_field_has_one_row_and_no_flag_is_used_twice():
    assert sorted(option.field for option in OWN) == sorted(fields_of(RenderOptions))
    flags = [flag for option in ALL_OPTIONS for flag in option.all_flags]
    assert len(flags) == len(set(flags))
    assert not set(flags) & set(HELP_FLAGS)
    fields = [option.field for option in ALL_OPTIONS]
    assert len(fields) == len(set(fields))


def test_every_row_can_be_explained():
    for option in OWN:
        assert option.help.endswith(".")
        assert option.group in GROUP_TITLES
        assert option.metavar or option.kind == "flag"
        assert option.variable == (
            None
            if option.field in ("out", "force")
            else f"DISTLAUNCH_RENDER_{option.field.upper()}"
        )


@pytest.mark.parametrize(
    ("word", "hint"),
    [("-t", "--time"), ("--signal=USR1@300", "--usr1-before SECONDS"), ("-N4", "--num-nodes")],
)
def test_an_option_of_sbatch_is_answered_with_the_one_of_render(word, hint):
    with pytest.raises(UsageError, match="unknown option") as caught:
        parse_render("slurm", [word, "12h", "t.py"], {})
    assert caught.value.hint.startswith(hint)
    assert "sbatch -" in caught.value.hint


@pytest.mark.parametrize("word", ["--qos", "--constraint", "-C", "--mail-type"])
def test_an_option_that_only_sbatch_has_is_to_be_given_to_it(word):
    with pytest.raises(UsageError) as caught:
        parse_render("slurm", [word, "x", "--num-nodes", "2", "a.py"], {})
    assert f"sbatch {word}" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "has_notice"),
    [
        (("--num-nodes", "4", "--num-gpus", "8"), True),
        (("--num-nodes", "4", "--gpus-per-node", "8"), False),
        (("--num-nodes", "4", "--num-procs", "4"), False),
        (("--num-nodes", "1", "--num-gpus", "8"), False),
    ],
)
def test_a_total_that_is_divided_among_nodes_is_pointed_out(words, has_notice, capsys):
    render_file("slurm", *parse_render("slurm", [*words, "a.py"], {}))
    assert ("--gpus-per-node 8" in capsys.readouterr().err) == has_notice


def test_an_unknown_option_that_sbatch_lacks_too_has_the_usual_hint():
    with pytest.raises(UsageError) as caught:
        parse_render("slurm", ["--tmie", "12h", "t.py"], {})
    assert mentions(caught.value.hint, "--time")


@pytest.mark.parametrize("word", ["a=b.sbatch", "runs/lr=1.sh"])
def test_a_file_with_an_equals_sign_is_answered_with_out(word):
    with pytest.raises(UsageError, match=word.partition("=")[0]) as caught:
        parse_render("slurm", ["-o", word, "t.py"], {})
    assert mentions(caught.value.hint, f"--out '{word}'")


@pytest.mark.parametrize("target", TARGETS)
def test_an_option_of_another_kind_of_file_is_refused_by_name(target):
    for option in OWN:
        words = [option.name if option.kind == "flag" else f"{option.name}=1", "t.py"]
        if option in options_of(target):
            parse_render(target, words, {})
            continue
        with pytest.raises(UsageError, match=f"{option.name} .* {target}") as caught:
            parse_render(target, words, {})
        assert "render " in caught.value.hint


def test_a_variable_gives_a_default_only_where_it_means_something():
    environ = {
        "DISTLAUNCH_RENDER_IMAGE": "x:1",
        "DISTLAUNCH_RENDER_PVC": "a:/a b:/b",
        "DISTLAUNCH_RENDER_PARTITION": "p",
    }
    assert parse_render("kubernetes", ["t.py"], environ)[1] == RenderOptions(
        image="x:1", pvc=("a:/a", "b:/b")
    )
    assert parse_render("slurm", ["t.py"], environ)[1] == RenderOptions(partition="p")
    assert parser.unknown_variables(environ) == []


def test_the_application_parses_render_as_the_start_path_does():
    seen = []

    def take(*parsed):
        seen.append(parsed)
        return 7

    words = ["--image=x", "--pvc", "b:/b", "--num_nodes=2", "--out=f", "--", "t.py", "-x", "A=1"]
    environ = {"DISTLAUNCH_RENDER_CPUS": "3"}
    assert run_app(["render", "trainjob", *words], environ, render=take) == 7
    assert seen == [("trainjob", *parse_render("trainjob", words, environ))]
    with pytest.raises(UsageError, match="--image"):
        run_app(["render", "slurm", *words], environ, render=take)


def test_help_of_render_is_of_its_target(capsys):
    assert run(["render", "slurm", "--image=x", "--help"], {}) == 0
    text = capsys.readouterr().out
    assert "--partition" in text
    assert "--image" not in text
    assert "--ssh-key" not in text, "options that do not apply are left out"


def test_render_without_a_kind_lists_the_kinds_and_fails(capsys):
    assert run(["render"], {}) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(f"\n  {target} " in shown.err for target in TARGETS)


@pytest.mark.parametrize(
    ("words", "rendered"),
    [
        (
            ["render", "helm"],
            "render prints slurm, kubernetes, pytorchjob, trainjob, and no 'helm'",
        ),
        (["render", "slurm"], "SCRIPT is missing"),
    ],
)
def test_wrong_arguments_are_reported(words, rendered):
    with pytest.raises(UsageError) as caught:
        run_app(words, {})
    assert caught.value.message == rendered


def command(tmp_path, *words: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    env = {"PATH": os.defpath, "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", **environ}
    words = (sys.executable, "-m", "distlaunch", "render", *words)
    env["PYTHONPATH"] = os.path.dirname(
        os.path.dirname(os.path.abspath(parser.__file__))
    ).removesuffix("/distlaunch")
    return subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, timeout=60, check=False
    )


def test_the_file_goes_to_stdout_or_where_it_is_wanted_as_utf_8_in_any_locale(tmp_path):
    words = ["kubernetes", "--image=x", "--gpus-per-node=2", "--name=a"]
    shown = command(
        tmp_path, *words, "t.py", "😀", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"
    )
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert '- "😀"\n'.encode() in shown.stdout
    written = command(tmp_path, *words, "--out", "job.yaml", "t.py", "😀", LC_ALL="C.UTF-8")
    assert (written.returncode, written.stdout) == (0, b"")
    assert b"job.yaml is written" in written.stderr
    assert (tmp_path / "job.yaml").read_bytes() == shown.stdout


def test_an_error_is_two_lines_and_leaves_the_file_alone(tmp_path):
    (tmp_path / "job.yaml").write_text("old")
    failed = command(tmp_path, "kubernetes", "--gpus-per-node=2", "--out", "job.yaml", "t.py")
    assert (failed.returncode, failed.stdout) == (2, b"")
    first, second = failed.stderr.decode().splitlines()
    assert mentions(first, "--image", "missing")
    assert second.startswith("  hint: --image NAME")
    assert (tmp_path / "job.yaml").read_text() == "old"


def test_a_file_that_cannot_be_written_is_reported(tmp_path):
    failed = command(tmp_path, "slurm", "--gpus-per-node=2", "--out=no/such/folder", "t.py")
    assert failed.returncode == 2
    assert mentions(failed.stderr.decode(), "--out 'no/such/folder'", "No such file or directory")


def test_nothing_heavy_is_loaded_to_print_a_file(tmp_path):
    code = (
        "import sys, distlaunch.__main__ as command\n"
        "command.run(['render', 'kubernetes', '--image=x', '--gpus-per-node=2', 't.py'], {})\n"
        "print('MODULES', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    modules = set(done.stdout.partition("MODULES")[2].split())
    assert not modules & {"typer", "click", "rich", "pydantic", "yaml", "torch", "paramiko"}
    assert not {
        name
        for name in modules
        if name.startswith(
            ("distlaunch.coordinator", "distlaunch.launch.run", "distlaunch.core.agent")
        )
    }


@pytest.mark.parametrize(
    ("words", "out", "opt"),
    [
        (["-o", "job.yaml"], "job.yaml", ()),
        (["-o", "zero=3", "-o", "job.yaml", "--backend=deepspeed"], "job.yaml", ("zero=3",)),
        (["-o", "job.yaml", "--out=job.yaml"], "job.yaml", ()),
        (["-o", "zero", "--backend=deepspeed"], None, ("zero",)),
        (["--out=a=b"], "a=b", ()),
    ],
)
def test_a_word_without_an_equals_sign_is_the_file(words, out, opt):
    options, more = parse_render("slurm", [*words, "--gpus-per-node=2", "t.py"], {})
    assert (more.out, options.opt) == (out, opt)
    assert not opt or spell(options)
    assert opt or all(field != "opt" for field, _ in spell(options))


@pytest.mark.parametrize("words", [["-o", "a", "-o", "b"], ["-o", "a", "--out", "b"]])
def test_two_files_are_refused(words):
    with pytest.raises(UsageError, match="two files"):
        parse_render("slurm", [*words, "--gpus-per-node=2", "t.py"], {})


def test_a_script_that_is_not_here_is_a_note(tmp_path):
    command = [
        sys.executable,
        "-m",
        "distlaunch",
        "render",
        "slurm",
        "--gpus-per-node=2",
        "-o",
        "job",
        "t.py",
    ]
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}

    def render() -> tuple[int, str]:
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stderr

    written = f"distlaunch: {tmp_path}/job is written\n"
    note = f"distlaunch: t.py is not here (looked in {tmp_path}); the job needs it where it is submitted\n"
    assert render() == (0, written + note)
    (tmp_path / "t.py").write_text("")
    assert render() == (0, written)


def test_a_file_with_other_content_is_replaced_only_with_force(tmp_path):
    words = ["slurm", "--procs-per-node=2", "--no-python", "-o", "job.sh"]
    assert command(tmp_path, *words, "/bin/true").returncode == 0
    first = (tmp_path / "job.sh").read_bytes()
    assert command(tmp_path, *words, "/bin/true").returncode == 0, "the same content again"
    refused = command(tmp_path, *words, "--time=2h", "/bin/true")
    assert refused.returncode == 2
    assert b"--force" in refused.stderr
    assert (tmp_path / "job.sh").read_bytes() == first
    assert command(tmp_path, *words, "--time=2h", "--force", "/bin/true").returncode == 0
    assert b"#SBATCH --time=02:00:00" in (tmp_path / "job.sh").read_bytes()


def test_the_file_may_be_a_device(tmp_path):
    shown = command(tmp_path, "slurm", "--procs-per-node=2", "--out=/dev/stdout", "t.py")
    assert shown.returncode == 0
    assert shown.stdout.startswith(b"#!")
