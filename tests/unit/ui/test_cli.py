"""The typer application beside the quick parser, its help, and how errors leave the process."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distlaunch
from distlaunch.core.errors import LaunchError, UsageError
from distlaunch.ui import quick
from distlaunch.ui.cli import run_app
from distlaunch.ui.errors import guarded, print_warnings
from distlaunch.ui.option import Option
from distlaunch.ui.options import GROUP_TITLES, PLAN_OPTIONS, TRAIN_OPTIONS

VALUES = {
    "text": ["x", "a b", "A=1", "\udcff", "-", ""],
    "count": ["1", "8", "0", "-2", "x"],
    "count or auto": ["auto", "2", "0"],
    "count or range": ["2", "2:4", "4:2", "1:"],
    "whole": ["0", "3", "-1"],
    "port": ["29500", "0", "70000"],
    "seconds": ["0", "1.5", "5m", "nan", "-3"],
}
ODD_WORDS = [
    "--nun-gpus",
    "--no-quiet=1",
    "--no-dry-run",
    "-q",
    "--quiet=1",
    "--env",
    "--grace",
    "-x",
    "--",
    "-mq",
    "--lr",
    "--format=json",
    "--help",
]


def option_words(option: Option) -> st.SearchStrategy[list[str]]:
    flags = [*option.flags, "--" + option.name[2:].replace("-", "_")]
    if option.kind == "flag":
        flags += [option.negation, option.negation.replace("-", "_").replace("__", "--")] if option.negation else []
        return st.sampled_from(flags).map(lambda flag: [flag])
    values = [*option.choices, "odd"] if option.kind == "choice" else VALUES[option.kind]
    pairs = st.tuples(st.sampled_from(flags), st.sampled_from(values), st.booleans())
    return pairs.map(
        lambda p: [f"{p[0]}={p[1]}"] if p[2] and p[0][:2] == "--" else [p[0] + p[1]] if p[2] else [p[0], p[1]]
    )


def command_lines(options: tuple[Option, ...]) -> st.SearchStrategy[list[str]]:
    front = st.lists(st.one_of([option_words(option) for option in options]), max_size=4)
    odd = st.one_of(st.just([]), st.just([]), st.sampled_from(ODD_WORDS).map(lambda word: [word]))
    script = st.sampled_from([["train.py"], ["--", "train.py"], ["--script", "a.py"], []])
    rest = st.lists(
        st.sampled_from(["--lr", "0.1", "--", "-h", "--help", "--quiet", "", "\udcff", "-x", "ü"]), max_size=4
    )
    return st.tuples(front, odd, script, rest).map(
        lambda parts: [word for words in parts[0] for word in words] + parts[1] + parts[2] + parts[3]
    )


def environments() -> st.SearchStrategy[dict[str, str]]:
    variables = [option for option in TRAIN_OPTIONS if option.variable]
    item = st.sampled_from(variables).flatmap(
        lambda option: st.tuples(
            st.just(option.variable),
            st.sampled_from(["", "1", *option.choices, *VALUES.get(option.kind, [])]),
        )
    )
    return st.lists(item, max_size=2).map(dict)


def outcome(parse):
    """Give what a parser makes of a command line, its errors as data."""
    try:
        return parse()
    except quick.HelpRequested:
        return "help"
    except LaunchError as error:
        return type(error), error.message, error.hint


def through_typer(command: str, words: list[str], environ: dict[str, str]):
    seen = []

    def take(*parsed):
        seen.append(parsed[0] if len(parsed) == 1 else parsed)
        return 7

    code = run_app([command, *words], environ, train=take, plan=take)
    if not seen:
        return "help"
    assert code == 7
    return seen[0]


@settings(deadline=None, max_examples=150, database=None)
@given(words=command_lines(TRAIN_OPTIONS), environ=environments())
def test_typer_and_the_quick_parser_make_the_same_of_train(words, environ):
    expected = outcome(lambda: quick.parse_train(words, environ))
    assert outcome(lambda: through_typer("train", words, environ)) == expected


@settings(deadline=None, max_examples=50, database=None)
@given(words=command_lines(PLAN_OPTIONS), environ=environments())
def test_typer_and_the_quick_parser_make_the_same_of_plan(words, environ):
    expected = outcome(lambda: quick.parse_plan(words, environ))
    assert outcome(lambda: through_typer("plan", words, environ)) == expected


def test_the_help_of_train_names_every_option_and_group(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run_app(["train", "--num-gpus", "2", "--help"], {}) == 0
    text = capsys.readouterr().out
    for option in TRAIN_OPTIONS:
        assert all(flag in text for flag in option.all_flags)
        assert option.metavar in text
    assert all(title in text for group, title in GROUP_TITLES.items() if group != "render")
    assert "Usage: distlaunch train [OPTIONS] SCRIPT [ARGS]..." in text


def test_the_help_names_the_options_without_a_variable(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    run_app(["train", "--help"], {})
    words = " ".join(capsys.readouterr().out.split())
    assert "none have --script, -m, --no-python and --dry-run." in words
    assert "except warnings and errors." in words


@pytest.mark.parametrize(
    ("command", "shown"),
    [("deepspeed", ["--num-gpus ", "SCRIPT [ARGS]..."]), ("horovodrun", ["--num-proc  -np ", "COMMAND [ARGS]..."])],
)
def test_the_help_of_other_launchers_words_is_of_their_options(command, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run_app([command, "--help"], {}) == 0
    text = capsys.readouterr().out
    assert [each for each in shown if each not in text] == []
    assert "--hosts in DISTLAUNCH_HOSTS" in text
    assert "DISTLAUNCH_NUM_GPUS" not in text
    assert "DISTLAUNCH_TRAIN_BACKEND" not in text


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_no_word_at_all_is_a_wish_for_help(words, capsys):
    assert run_app(words, {}) == 0
    text = capsys.readouterr().out
    assert "train" in text
    assert "plan" in text
    assert "--install-completion" in text


def test_version_is_printed(capsys):
    assert run_app(["--version"], {}) == 0
    assert capsys.readouterr().out == f"distlaunch {distlaunch.__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "did you mean train?"),
        ("plans", "did you mean plan?"),
        (
            "accelerate",
            "distlaunch train --backend accelerate [-o config=FILE] SCRIPT [ARGS]... does as accelerate launch",
        ),
        ("xyz", "there are train, plan, torchrun, deepspeed, horovodrun, backends, render"),
    ],
)
def test_a_command_that_does_not_exist_is_answered_with_the_nearest(word, hint):
    with pytest.raises(UsageError) as caught:
        run_app([word, "x"], {})
    assert caught.value.message == f"there is no command '{word}'"
    assert caught.value.hint == hint


def test_an_option_that_the_root_does_not_have_is_an_error_of_ours():
    with pytest.raises(UsageError, match="--nothing"):
        run_app(["--nothing"], {})


def complete(words: str, cword: int) -> list[str]:
    env = {"PATH": os.defpath, "_DISTLAUNCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(cword)}
    done = subprocess.run(
        [sys.executable, "-m", "distlaunch"], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_the_shell_completes_commands_options_and_choices():
    assert complete("distlaunch tr", 1) == ["train"]
    assert complete("distlaunch train --num-g", 2) == ["--num-gpus"]
    assert complete("distlaunch train --no-q", 2) == ["--no-quiet"]
    assert complete("distlaunch plan --bind c", 3) == ["cores"]


def run_guarded(code: str, tmp_path: Path, *, unbuffered: str = "", **popen) -> subprocess.CompletedProcess[str]:
    """Run ``guarded(work)`` in a process of its own, where ``code`` defines ``work``."""
    source = f"import sys\nfrom distlaunch.ui.errors import guarded\n{code}\nsys.exit(guarded(work))\n"
    return subprocess.run(
        [sys.executable, "-c", source],
        env={"PATH": os.defpath, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=60,
        **popen,
    )


def test_a_handled_error_is_two_lines_and_its_own_code(capsys):
    def work() -> int:
        raise LaunchError("n3 does not answer", hint="start sshd\non it")

    assert guarded(work) == 70
    captured = capsys.readouterr()
    assert captured.err == "distlaunch: error: n3 does not answer\n  hint: start sshd\n  on it\n"
    assert captured.out == ""


def test_what_moves_the_cursor_is_escaped_in_an_error(capsys):
    def work() -> int:
        raise LaunchError("a\x1b[2J\x9b\udcff\rü", hint="\x07")

    guarded(work)
    assert capsys.readouterr().err == "distlaunch: error: a\\x1b[2J\\x9b\\xff\\rü\n  hint: \\x07\n"


def test_ctrl_c_is_answered_quietly(capsys):
    def work() -> int:
        raise KeyboardInterrupt

    assert guarded(work) == 130
    assert capsys.readouterr() == ("", "")


def test_a_fault_of_ours_is_one_line_and_a_private_file_with_the_traceback(tmp_path):
    done = run_guarded("def work():\n    raise ValueError('odd\\nmore')", tmp_path)
    (saved,) = tmp_path.iterdir()
    assert done.returncode == 70
    assert done.stderr == (
        f"distlaunch: internal error: ValueError: odd\n  please report it with the traceback, saved in {saved}\n"
    )
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert "Traceback" in saved.read_text()
    assert "ValueError: odd\nmore" in saved.read_text()


def test_a_fault_whose_traceback_cannot_be_saved_says_where_it_happened_in_one_line(tmp_path):
    code = "import tempfile\ntempfile.tempdir = '/nowhere'\nfrom distlaunch.ui.option import convert\n"
    done = run_guarded(f"{code}def work():\n    return convert(None, '', '')", tmp_path)
    first, second = done.stderr.splitlines()
    assert done.returncode == 70
    assert first.startswith("distlaunch: internal error: AttributeError: ")
    assert re.fullmatch(
        r"  raised at .*/distlaunch/ui/option\.py:\d+ in convert; the traceback could not be saved: .*'/nowhere/.*",
        second,
    )


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_has_gone_away_is_no_error_to_talk_about(lines, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    source = (
        "import sys\nfrom distlaunch.ui.errors import guarded\n"
        f"def work():\n    print('x\\n' * {lines})\n    return 0\nsys.exit(guarded(work))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", source], env={}, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_full_standard_output_is_told_in_one_line_and_is_no_fault_of_ours(lines, unbuffered, tmp_path):
    code = "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    code += f"def work():\n    for _ in range({lines}): print('line')\n    return 0"
    done = run_guarded(code, tmp_path, unbuffered=unbuffered)
    assert done.stderr == "distlaunch: error: cannot write to stdout: No space left on device\n"
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_standard_error_cannot_take_keeps_its_exit_code():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "distlaunch", "train", "--bogus"],
            stdout=subprocess.PIPE, stderr=full, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_disk_that_is_full_elsewhere_is_not_blamed_on_standard_output(tmp_path):
    done = run_guarded("def work(): raise OSError(28, 'No space left on device')", tmp_path)
    assert done.returncode == 70
    assert "internal error: OSError" in done.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--standalone", "s.py"], "distlaunch train [OPTIONS] SCRIPT; not needed here: one machine"),
        (["--nproc_per_node=2", "s.py"], "distlaunch train [OPTIONS] SCRIPT; --num-gpus N"),
        (["s.py"], "distlaunch train s.py"),
    ],
)
def test_a_command_line_of_torchrun_is_led_to_train(words, hint):
    with pytest.raises(UsageError) as caught:
        run_app(words, {})
    assert (caught.value.hint or "").startswith(hint)


def test_warnings_are_one_line_each(capsys):
    print_warnings(["one", "two\x1b"])
    print_warnings([])
    assert capsys.readouterr().err == "distlaunch: warning: one\ndistlaunch: warning: two\\x1b\n"


def test_missing_standard_streams_are_replaced_before_anything_is_opened(tmp_path):
    report = tmp_path / "report"
    source = (
        "import os, sys\nfrom distlaunch.ui.errors import repair_standard_streams\nrepair_standard_streams()\n"
        "print('nobody reads this')\nprint('nor this', file=sys.stderr)\nsys.stdin.read()\n"
        "names = [os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)]\n"
        "kept = all(map(os.get_inheritable, (0, 1, 2)))\n"
        f"open({str(report)!r}, 'w').write(f'{{names}} {{kept}}')\n"
    )
    shell = 'exec "$0" -c "$1" <&- >&- 2>&-'
    subprocess.run(["/bin/sh", "-c", shell, sys.executable, source], env={}, timeout=60, check=True)
    assert report.read_text() == "['/dev/null', '/dev/null', '/dev/null'] True"


@pytest.mark.parametrize("words", [["train", "--bogus"], ["train"], ["nothing"], ["--help"], ["train", "--help"]])
def test_the_command_works_without_any_standard_stream(words):
    shell = 'exec "$@" <&- >&- 2>&-'
    done = subprocess.run(
        ["/bin/sh", "-c", shell, "sh", sys.executable, "-m", "distlaunch", *words],
        env={"PATH": os.defpath},
        timeout=60,
        check=False,
    )
    assert done.returncode == (0 if words[-1] == "--help" else 2)


def test_a_plan_that_nobody_reads_to_its_end_is_no_error_to_talk_about(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    words = ["plan", "--num-procs", "64", "--no-python", "/bin/true"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "distlaunch", *words],
            env={"PATH": os.defpath, "HOME": str(tmp_path)},
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_the_command_prints_an_error_and_exits_with_its_code():
    done = subprocess.run(
        [sys.executable, "-m", "distlaunch", "train", "--num-gpus", "four", "x.py"],
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "distlaunch: error: --num-gpus takes a whole number >= 1 or 'auto', not 'four'\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["python", "-m", "torch.distributed.run", "x.py"], "distlaunch torchrun"),
        (["/usr/bin/python3", "-u", "-m", "torch.distributed.launch", "x.py"], "distlaunch torchrun"),
        (["/venv/bin/torchrun", "x.py"], "distlaunch torchrun"),
        (["python3", "x.py"], "distlaunch train"),
        (["run", "x.py"], "distlaunch train"),
        (["x.py"], "distlaunch train x.py"),
        (["trian", "x.py"], "did you mean train?"),
    ],
    ids=str,
)
def test_words_of_other_launchers_lead_to_the_command_that_takes_them(words, hint):
    with pytest.raises(UsageError) as caught:
        run_app(words, {})
    assert hint in (caught.value.hint or "")
