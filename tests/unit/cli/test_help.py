from __future__ import annotations

import re
from importlib import import_module

import pytest

import distlaunch
from distlaunch.__main__ import run
from distlaunch.cli.help import SUMMARIES, help_text
from distlaunch.cli.help_layout import COMMON, default_note
from distlaunch.cli.option_table import GROUP_TITLES, TRAIN_OPTIONS
from distlaunch.cli.pages import plain_page, topics
from distlaunch.core.errors import UsageError
from tests.facts import mentions

COMMANDS = ((), ("render",), ("accelerate",), *SUMMARIES)


def shown(words: list[str], capsys, columns: int = 80) -> str:
    assert run(words, {"COLUMNS": str(columns)}) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_every_command_fits_80_columns_and_cuts_nothing(words, capsys):
    text = shown([*words, "--help"], capsys)
    assert text.startswith("Usage: distlaunch")
    assert "\u2026" not in text
    assert "\u2502" not in text, "a box"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_and_a_command_is_the_same_as_the_command_with_help(words, capsys):
    text = shown([*words, "-h"], capsys)
    assert shown(["help", *words], capsys) == text
    assert text.rstrip("\n") == help_text(words, 80).rstrip("\n")


def test_help_of_train_shows_examples_then_common_options_then_groups(capsys):
    text = shown(["train", "--num-gpus", "2", "--help"], capsys)
    titles = re.findall(r"^([A-Z][^:\n]*):$", text, re.MULTILINE)
    groups = [title for title in GROUP_TITLES.values() if title in titles]
    assert titles == ["Examples", "Common options", *groups, "Help"]
    common = text.partition("Common options:")[2].partition("Script:")[0]
    assert [field for field in COMMON if f"--{field.replace('_', '-')} " not in common] == [
        "num_proc",
        "num_processes",
        "num_machines",
        "image",
        "time",
        "out",
    ]
    assert all(flag in text for option in TRAIN_OPTIONS for flag in option.all_flags)
    without = "--script, --module, --no-python, --detach, --dry-run have no variable"
    assert without in " ".join(text.split())


@pytest.mark.parametrize("option", TRAIN_OPTIONS, ids=lambda option: option.name)
def test_help_says_the_default_of_every_option_of_train(option):
    assert default_note(option).endswith(".")


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("--hang-timeout", "Off by default."),
        ("--forward-env", "On by default."),
        ("--quiet", "Off by default."),
        ("--grace", "Default: 25 s."),
        ("--max-restarts", "Default: 0."),
        ("--output", "Default: all."),
    ],
)
def test_a_default_is_a_sentence(name, note):
    option = next(option for option in TRAIN_OPTIONS if option.name == name)
    assert default_note(option) == note


@pytest.mark.parametrize("words", [("deepspeed",), ("horovodrun",), ("accelerate", "launch")])
def test_help_of_another_launchers_command_has_all_options(words, capsys):
    text = shown([*words, "--help"], capsys)
    options = import_module(f"distlaunch.cli.compat.{words[0]}.options").OPTIONS
    assert [flag for option in options for flag in option.all_flags if flag not in text] == []
    assert "--hosts in DISTLAUNCH_HOSTS" in " ".join(text.split())
    assert "DISTLAUNCH_NUM_GPUS" not in text
    assert "DISTLAUNCH_TRAIN_BACKEND" not in text


def test_help_lists_the_commands_by_purpose(capsys):
    text = shown([], capsys)
    titles = re.findall(r"^([A-Z][^:\n]*):$", text, re.MULTILINE)
    assert titles[1:6] == ["Run", "Jobs", "Look", "Drop-ins for other launchers", "Files"]
    assert all(f"\n  {' '.join(words)} " in text for words in SUMMARIES)


def test_a_long_example_can_be_copied(capsys):
    text = shown(["torchrun", "--help"], capsys)
    command = text.partition("Examples:")[2].partition("The same command")[0]
    assert " \\\n    --rdzv-endpoint" in command


@pytest.mark.parametrize("columns", [20, 80, 300])
def test_help_keeps_to_the_width_of_the_terminal(columns, capsys):
    text = shown(["train", "--help"], capsys, columns)
    assert max(map(len, text.splitlines())) <= max(60, min(columns, 100))


@pytest.mark.parametrize("page", topics())
def test_help_prints_a_page(page, capsys):
    text = shown(["help", page], capsys)
    title, underline = text.splitlines()[:2]
    assert underline == "=" * len(title)
    assert "<!--" not in text, "comments are for tests"


@pytest.mark.parametrize("page", topics())
@pytest.mark.parametrize("columns", [60, 80])
def test_a_page_in_a_pipe_is_plain_text_of_the_width_that_is_asked_for(page, columns, capsys):
    text = shown(["help", page], capsys, columns)
    prose = [line for line in text.splitlines() if not line.startswith("    ")]
    assert [line for line in prose if len(line) > columns and " " in line.strip()] == []
    assert [line for line in prose if line.startswith(("|", "#")) or "](" in line] == []


def test_plain_text_keeps_lists_code_and_the_pages_that_links_lead_to():
    page = """# Title

A [page](slurm.md#requeue), a **bold** word and `a|b`.

* one
  more
* two

```sh
run  this
```

| name | is | not for |
| --- | --- | --- |
| `a\\|b` | text | x |
"""
    assert (
        plain_page(page, 80)
        == """Title
=====

A page (help slurm), a bold word and `a|b`.

* one more
* two

    run  this

`a|b`
    is: text
    not for: x
"""
    )


def found_by(word: str, capsys) -> list[tuple[str, str]]:
    """Return the pages for a word, each with its heading."""
    return re.findall(
        r"^  distlaunch help ([\w-]+): (.*)$", shown(["help", word], capsys), re.MULTILINE
    )


def test_help_for_a_word_shows_the_options_and_pages_that_mention_it(capsys):
    text = shown(["help", "log"], capsys)
    assert "--log-dir DIR" in text
    assert "Usage:" not in text
    assert "\n  distlaunch help output: Output and logs\n" in text
    assert "\n      `attempt-<k>/rank-<r>.log`: stdout and stderr of rank r in attempt k\n" in text


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("ctrl-c", ("failures", "Stop a job")),
        ("75", ("exit-codes", "Exit codes")),
        ("69", ("exit-codes", "Exit codes")),
        ("exit", ("exit-codes", "Exit codes")),
        ("restart", ("restarts", "Restarts and elastic jobs")),
        ("DISTLAUNCH_RUN_DIR", ("environment", "What workers get")),
        ("DISTLAUNCH_ATTEMPT", ("environment", "What workers get")),
        ("OMP_NUM_THREADS", ("environment", "What workers get")),
        ("LOCAL_RANK", ("environment", "What workers get")),
        ("MASTER_PORT", ("environment", "What workers get")),
        ("NODE_RANK", ("environment", "What workers get")),
    ],
)
def test_the_page_whose_subject_is_the_word_comes_first(word, first, capsys):
    assert found_by(word, capsys)[0] == first


@pytest.mark.parametrize("word", ["rank", "restart", "signal", "job"])
def test_a_search_shows_few_hits_and_pages_for_developers_last(word, capsys):
    text = shown(["help", word], capsys)
    pages = [page for page, _ in found_by(word, capsys)]
    assert len(pages) + len(re.findall(r"^  -", text, re.MULTILINE)) <= 10
    assert not {"traps", "architecture", "setup"} & {*pages}
    assert re.search(r"^Not shown: [0-9]+ more page", text, re.MULTILINE)


@pytest.mark.parametrize("flag", ["--time", "--out", "DISTLAUNCH_RENDER_TIME"])
def test_help_for_an_option_of_render_shows_that_option(flag, capsys):
    text = shown(["help", flag], capsys)
    option = "--out FILE" if flag == "--out" else "--time 120|"
    assert (
        f"distlaunch render slurm, render kubernetes, render pytorchjob, render trainjob:\n  {option}"
        in text
    )


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--signal", "Instead of sbatch's --signal, for render slurm: --usr1-before SECONDS: "),
        ("-t", "Instead of sbatch's -t, for render slurm: --time."),
        ("--nproc_per_node", "Instead of torchrun's --nproc-per-node: --gpus-per-node N, or "),
    ],
)
def test_help_for_an_option_of_another_program_names_ours(flag, line, capsys):
    assert line in " ".join(shown(["help", flag], capsys).split())


def test_help_of_render_says_its_own_defaults(capsys):
    text = " ".join(shown(["render", "slurm", "--help"], capsys).split())
    assert "for example at its time limit. On by default." in text
    assert "nodes may leave and join while the job runs. Default: 1." in text
    assert "machine without GPUs" not in text
    assert "Default: every visible GPU" not in text


def test_help_for_an_option_shows_that_option(capsys):
    text = shown(["help", "--hang_timeout"], capsys)
    assert "--hang-timeout SECONDS" in text
    assert "--hang-notice" not in text


def test_help_for_a_word_that_nothing_mentions_names_commands_and_pages():
    with pytest.raises(UsageError, match="'trian'") as caught:
        run(["help", "trian"], {})
    hint = caught.value.hint or ""
    assert mentions(hint, "train")
    assert set(topics()) <= set(hint.replace(",", "").split())


def test_help_for_a_kind_of_file_that_there_is_not_names_those_there_are():
    with pytest.raises(UsageError, match="'render helm'") as caught:
        run(["help", "render", "helm"], {})
    assert "render slurm" in (caught.value.hint or "")


def test_version_is_printed_in_both_ways(capsys):
    assert shown(["--version"], capsys) == f"distlaunch {distlaunch.__version__}\n"
    text = shown(["version"], capsys)
    assert text.startswith(f"distlaunch {distlaunch.__version__} (")
    assert "\nPython 3." in text
