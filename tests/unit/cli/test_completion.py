from __future__ import annotations

from importlib import import_module

import pytest

from distlaunch.__main__ import run
from distlaunch.backends.registry import other_backends
from distlaunch.cli.app import run_app
from distlaunch.cli.commands.render import TARGETS, options_of
from distlaunch.cli.completion import complete, completion, split_line
from distlaunch.cli.help import SUMMARIES
from distlaunch.cli.option_table import PLAN_OPTIONS, TRAIN_OPTIONS
from distlaunch.cli.pages import topics
from distlaunch.core.errors import UsageError

TABLES = {
    ("train",): TRAIN_OPTIONS,
    ("plan",): PLAN_OPTIONS,
    **{("render", target): options_of(target) for target in TARGETS},
    **{
        words: import_module(f"distlaunch.cli.compat.{words[0]}.options").OPTIONS
        for words in (("torchrun",), ("deepspeed",), ("horovodrun",), ("accelerate", "launch"))
    },
}


def values(*words: str, environ: dict[str, str] | None = None) -> list[str]:
    found = complete(words, environ or {})
    assert found.kind == "words"
    return [found.prefix + value for value, _ in found.rows]


def kind(*words: str) -> tuple[str, str]:
    found = complete(words, {})
    assert found.rows == ()
    return found.kind, found.prefix


def test_the_first_word_is_a_command():
    assert values("") == [*dict.fromkeys(words[0] for words in SUMMARIES)]
    assert values("tr") == ["train"]
    assert values("--v") == ["--version"]


def test_commands_of_several_words_are_completed():
    assert values("render", "") == list(TARGETS)
    assert values("accelerate", "") == ["launch"]
    assert values("completion", "") == ["bash", "zsh", "fish"]
    assert values("help", "render", "s") == ["slurm"]
    assert set(topics()) <= set(values("help", ""))


@pytest.mark.parametrize("command", TABLES, ids=" ".join)
def test_every_option_of_every_command_is_completed(command):
    wanted = {
        flag
        for option in TABLES[command]
        if getattr(option, "group", "") not in ("refused", "no effect")
        for flag in option.all_flags
    }
    assert set(values(*command, "-")) == wanted | {"--help", "-h"}


@pytest.mark.parametrize("command", TABLES, ids=" ".join)
def test_every_choice_of_every_option_is_completed_and_every_file(command):
    kinds = {"FILE": "files", "PATH": "files", "DIR": "directories"}
    count = 0
    for option in TABLES[command]:
        words = (*command, option.name)
        if choices := getattr(option, "choices", ()):
            assert values(*words, "") == list(choices)
            assert values(*command, f"{option.name}=") == [f"{option.name}={x}" for x in choices]
            count += 1
        if option.metavar in kinds:
            assert kind(*words, "x") == (kinds[option.metavar], "")
            assert kind(*command, f"{option.name}=x") == (
                kinds[option.metavar],
                f"{option.name}=",
            )
            count += 1
    assert count >= 3


def test_values_of_options_are_completed():
    assert values("train", "--num-gpus", "a") == ["auto"]
    assert values("train", "--output", "") == ["all", "none"]
    assert "slurm" in values("train", "--source", "")
    assert values("train", "-x", "PA", environ={"PATH": "/bin", "HOME": "/"}) == ["PATH"]
    assert values("train", "--max-restarts", "") == []
    assert values("torchrun", "--nproc_per_node", "a") == ["auto"]


def test_backends_and_their_options_are_completed():
    assert values("train", "--backend", "dee") == ["deepspeed"]
    assert values("plan", "--backend=f") == ["--backend=fsdp"]
    assert "horovod" in values("backends", "")
    assert values("backends", "--format", "") == ["table", "json"]
    assert values("backends", "--format=j") == ["--format=json"]
    assert kind("backends", "--python", "") == ("files", "")
    assert values("train", "--backend", "deepspeed", "-o", "ze") == ["zero="]
    assert "zero=" in values("deepspeed", "--opt", "")
    assert values("train", "--backend", "nothing", "-o", "") == []


def test_backends_of_other_packages_are_completed(tmp_path, monkeypatch):
    points = "[console_scripts]\nx = y:z\n[distlaunch.backends]\njax = p:Jax\n\n[other]\na = b\n"
    info = tmp_path / "p-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    assert set(other_backends()) >= {"jax"}
    assert values("train", "--backend", "ja") == ["jax"]
    assert not {"x", "a"} & set(values("train", "--backend", ""))


def test_an_option_is_completed_as_it_was_begun():
    assert values("torchrun", "--nproc_") == ["--nproc_per_node"]
    assert values("train", "--max_re") == ["--max_restarts"]


def test_options_end_at_the_script():
    assert kind("train", "") == ("files", "")
    assert kind("train", "--num-procs", "2", "train.py", "--ba") == ("files", "")
    assert kind("train", "--", "--ba") == ("files", "")
    assert values("train", "--num-procs", "2", "--ba") == ["--backend"]
    assert kind("horovodrun", "-np", "2", "") == ("files", "")


@pytest.mark.parametrize(
    "words",
    [["nothing", ""], ["train", "--nothing", ""], ["train", "-h", ""], ["version", ""]],
    ids=" ".join,
)
def test_where_nothing_fits_there_are_no_candidates(words):
    assert complete(words, {}).rows == ()


def test_refused_options_are_not_offered():
    assert "--mpi" not in values("horovodrun", "--m")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("distlaunch tr", ["distlaunch", "tr"]),
        ("distlaunch train ", ["distlaunch", "train", ""]),
        ("distlaunch train --log-dir 'a b", ["distlaunch", "train", "--log-dir", "a b"]),
        ('distlaunch "a b', ["distlaunch", "a b"]),
        ("distlaunch a\\ b", ["distlaunch", "a b"]),
        ("distlaunch a\\", ["distlaunch", "a\\"]),
    ],
)
def test_a_line_is_split_as_the_shell_splits_it(line, words):
    assert split_line(line) == words


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["bash", "distlaunch train --backend=de", "de"], ["words\t--backend=", "deepspeed"]),
        (["bash", "distlaunch train --backend=", ""], ["words\t--backend="]),
        (["bash", "distlaunch train --hosts a:4,b:4 --num-pro", "--num-pro"], ["words\t"]),
        (["fish", "train", "--bind=n"], ["words\t--bind=", "--bind=none", "--bind=numa"]),
        (["zsh", "train", "--bind=nu"], ["words\t--bind=", "numa"]),
    ],
    ids=str,
)
def test_each_shell_gets_candidates_in_its_form(words, lines, capsys):
    assert completion(["--words", *words], {}) == 0
    assert capsys.readouterr().out.splitlines()[: len(lines)] == lines


def test_descriptions_are_for_the_shells_that_show_them(capsys):
    assert completion(["--words", "zsh", "render", "slu"], {}) == 0
    assert completion(["--words", "fish", "render", "slu"], {}) == 0
    assert completion(["--words", "bash", "distlaunch render slu", "slu"], {}) == 0
    text = SUMMARIES["render", "slurm"]
    assert capsys.readouterr().out.splitlines()[1::2] == [
        f"slurm:{text}",
        f"slurm\t{text}",
        "slurm",
    ]


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"], ["--words"]], ids=str)
def test_a_shell_without_a_script_is_refused_with_those_there_are(words):
    with pytest.raises(UsageError, match="bash, zsh, fish"):
        run(["completion", *words], {})


@pytest.mark.parametrize("flag", ["--install-completion", "--show-completion"])
def test_typers_own_completion_is_not_there(flag):
    with pytest.raises(UsageError) as caught:
        run_app([flag], {})
    assert "distlaunch completion SHELL" in (caught.value.hint or "")
