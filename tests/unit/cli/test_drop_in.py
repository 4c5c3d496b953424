from __future__ import annotations

from importlib import import_module

import pytest

from distlaunch.cli.compat.torchrun.command_line import parse
from distlaunch.cli.compat.torchrun.options import OPTIONS as TORCHRUN_OPTIONS
from distlaunch.cli.compat.torchrun.translate import translate
from distlaunch.cli.option import Spelling
from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.cli.parser import scan, whole_name
from distlaunch.core.errors import UsageError
from distlaunch.core.model.option_names import Opt, OptionNames, use_names


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
    gpus = Spelling(flags=("--num-gpu-cards", "--num-gpus"), field="num_gpus", kind="count")
    nodes = Spelling(flags=("--num-nodes",), field="num_nodes", kind="count", shown="--num_nodes")
    home = Spelling(flags=("--home",), field="home", kind="text")
    fields = {"--num-gpus": gpus, "--num-gpu-cards": gpus, "--num-nodes": nodes, "--home": home}
    assert whole_name("--num_g", fields) == "--num-gpus"
    assert whole_name("--nim", fields) == "--nim"
    assert whole_name("--hel", fields) == "--help"
    with pytest.raises(
        UsageError,
        match=r"'--n' .* --num-gpus, --num-gpu-cards, --num_nodes",
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


DROP_INS = ("torchrun", "accelerate", "deepspeed", "horovodrun")


def names_of(command: str) -> OptionNames:
    if command == "torchrun":
        return translate(parse(["s.py"], {}), {}).options.dialect.names
    return import_module(f"distlaunch.cli.compat.{command}.translate").NAMES


def known_words(command: str) -> set[str]:
    """Return the options and variables of a command, with dashes and with underscores."""
    rows = import_module(f"distlaunch.cli.compat.{command}.options").OPTIONS
    flags = {flag for option in rows for flag in option.all_flags}
    read = {option.variable for option in (*rows, *TRAIN_OPTIONS) if option.variable}
    return flags | {f"--{flag[2:].replace('-', '_')}" for flag in flags} | read


@pytest.mark.parametrize("command", DROP_INS)
@pytest.mark.parametrize("option", Opt, ids=lambda option: option.value)
def test_a_message_names_an_option_that_the_command_has_or_says_that_it_is_trains(command, option):
    known = known_words(command)
    with use_names(names_of(command)):
        name, setting, exists = str(option), option("X"), option.exists
    if not exists:
        assert name.startswith("distlaunch train -")
        return
    if option in (Opt.SCRIPT, Opt.BACKEND):
        assert name == {"script": "COMMAND" if command == "horovodrun" else "SCRIPT"}.get(
            option.value, "the backend"
        )
        return
    for word in (*name.split(), *setting.split()):
        flag = word.partition("=")[0]
        if flag.startswith("-") and flag != "-o":
            assert flag in known, (name, setting)
    if not name.startswith("-"):
        assert name in known | {"CUDA_VISIBLE_DEVICES", "PYTHON_EXEC"}


@pytest.mark.parametrize("command", DROP_INS)
def test_every_option_that_a_message_writes_with_a_certain_value_is_one_of_the_command(command):
    known, names = known_words(command), names_of(command)
    advice = filter(None, (names.use_cpus, names.use_cpus_of_each, names.more_cpu_workers))
    for text in (*names.with_value.values(), *names.with_this_value.values(), *advice):
        flags = [word.partition("=")[0] for word in text.split() if word.startswith("--")]
        assert set(flags) <= known, text


def test_every_option_in_messages_is_a_field_of_train():
    fields = {option.field for option in TRAIN_OPTIONS}
    assert {option.value for option in Opt} - fields == {"rendezvous_port"}
    for option in TRAIN_OPTIONS:
        if option.field in {each.value for each in Opt} - {"script"}:
            assert str(Opt(option.field)) in option.flags


def test_torchruns_names_are_of_what_set_the_value():
    names = translate(parse(["s.py"], {"PET_NNODES": "1"}), {}).options.dialect.names
    assert names.name("num_nodes") == "PET_NNODES"
    assert {option.name for option in TORCHRUN_OPTIONS} >= {names.name("max_restarts")}
