"""Backends of other packages that are not what they promise to be: whose fault it is, is said."""

from __future__ import annotations

import signal
import sys

import pytest

from distlaunch.backends.base import Backend, BackendOption, Requirement
from distlaunch.backends.plugins import guarded
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from distlaunch.planning.backend import PlannedBackend

ONE = Topology(nodes=(Node(host="a", slots=1),), device="cpu")
ARGUMENTS = {
    "__init__": ({}, {}), "env_files": ({}, "/"), "sized": (None,), "location": (None, "a"), "needed": ({},),
    "notes_on": (ONE,), "notes_on_script": ("t.py", ""), "check": (ONE,), "check_files": ({}, None), "check_meeting": ((), ()), "job_variables": (ONE,),
    "default_variables": (ONE,), "node_variables": (ONE, 0), "worker_variables": (ONE, 0, 0, 0),
    "cluster_variables": ((),), "task_variables": (1, 0), "attempt_files": (ONE,), "worker_words": (0,),
    "options": (), "repeated": (), "script_words": (), "agreed": (), "notes": (),
    "unwanted": (), "fewer_workers": (),
}  # fmt: skip


class Good(Backend):
    name = "good"
    about = "does as it should"


def made(**body) -> type[Backend]:
    return guarded(type("Theirs", (Good,), body), "good", "their-package")


def of_class(method: str, function):
    return classmethod(function) if method in ("options", "env_files") else function


def asked(kind: type[Backend], method: str):
    if method in ("__init__", "options", "env_files"):
        return (kind if method == "__init__" else getattr(kind, method))(*ARGUMENTS[method])
    found = getattr(kind({}, {}), method)
    return found if method == "notes" else found(*ARGUMENTS[method])


def test_all_methods_are_held():
    public = {
        name
        for kind in (Backend, PlannedBackend)
        for name, found in vars(kind).items()
        if callable(found)
    }
    public |= {"options", "env_files", "notes"}
    assert {name for name in public if not name.startswith("_")} | {"__init__"} == ARGUMENTS.keys()


@pytest.mark.parametrize("method", ARGUMENTS)
def test_whatever_a_method_raises_is_named_with_its_package(method):
    def fail(*_):
        raise KeyError("x\n")

    kind = made(**{method: property(fail) if method == "notes" else of_class(method, fail)})
    with pytest.raises(ConfigError) as caught:
        asked(kind, method)
    assert caught.value.message == (
        f"--backend 'good': their-package is at fault: Theirs.{method}: KeyError: 'x\\n'"
    )
    assert "their-package" in str(caught.value.hint)


class Strange(BaseException):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (SystemExit(0), "SystemExit: 0"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Strange(), "Strange"),
    ],
    ids=["sys.exit", "a Ctrl-C that is none", "no text"],
)
@pytest.mark.parametrize("method", ["options", "job_variables"])
def test_no_method_ends_the_launcher(method, end, said):
    def finish(*_):
        raise end

    with pytest.raises(ConfigError) as caught:
        asked(made(**{method: of_class(method, finish)}), method)
    assert caught.value.message.endswith(f"their-package is at fault: Theirs.{method}: {said}")
    assert caught.value.__cause__ is end


def pressed():
    signal.raise_signal(signal.SIGINT)


def pressed_and_forgotten():
    try:
        pressed()
    except KeyboardInterrupt:
        return {}


def pressed_and_refused():
    try:
        pressed()
    except KeyboardInterrupt:
        raise ConfigError("not now") from None


def pressed_and_left():
    try:
        pressed()
    except KeyboardInterrupt:
        sys.exit(0)


@pytest.mark.parametrize(
    "answer", [pressed, pressed_and_forgotten, pressed_and_refused, pressed_and_left]
)
def test_a_ctrl_c_ends_the_launcher_whatever_a_method_makes_of_it(answer):
    kind = made(agreed=lambda self: answer(), job_variables=lambda self, topology: self.agreed())
    with pytest.raises(KeyboardInterrupt):
        asked(kind, "job_variables")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_a_ctrl_c_is_answered_otherwise_it_is_left_to_who_does():
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    try:
        assert made(agreed=lambda self: pressed() or {})({}, {}).agreed() == {}
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard


def test_what_a_method_prints_is_not_on_stdout(capsys):
    made(agreed=lambda self: print("here") or {})({}, {}).agreed()
    assert capsys.readouterr() == ("", "here\n")


def test_a_class_that_cannot_be_held_is_named_with_its_package():
    class Final(Good):
        def __init_subclass__(cls):
            raise TypeError("no more")

    with pytest.raises(
        ConfigError, match="--backend 'good': their-package is at fault: Final: TypeError: no more"
    ):
        guarded(Final, "good", "their-package")


def test_what_it_refuses_itself_stays_as_it_is():
    def refuse(self, topology):
        raise ConfigError("not so")

    with pytest.raises(ConfigError, match="not so"):
        made(check=refuse)({}, {}).check(ONE)


@pytest.mark.parametrize(
    ("method", "value", "said"),
    [
        ("job_variables", {"N": 3}, "the value of N is '3', text without NUL is needed"),
        ("worker_variables", {"N": "a\0b"}, "the value of N"),
        ("default_variables", {"A=B": ""}, "no name of a variable"),
        ("node_variables", {"RANK": "1"}, "RANK is distlaunch's to set"),
        ("cluster_variables", None, "a mapping is needed, not 'None'"),
        ("attempt_files", {"F": "../x"}, "no file in the attempt's folder"),
        ("script_words", "--all", "a list of texts is needed"),
        ("notes", iter("ab"), "a list of texts is needed"),
        ("worker_words", (1,), "'1' is no text"),
        (
            "worker_words",
            ("--all", "x" * 131_072),
            "xxx'... is 131,072 bytes, Linux takes 131,071 of one argument",
        ),
        (
            "script_words",
            ("x" * 3_000_000,),
            "xxx'... is 3,000,000 bytes, Linux takes 131,071 of one argument",
        ),
        (
            "worker_variables",
            {"N": "x" * 131_070},
            "N is 131,072 bytes, Linux takes 131,071 of one",
        ),
        (
            "node_variables",
            {"A": "b", "N": "x" * 131_070},
            "N is 131,072 bytes, Linux takes 131,071 of one",
        ),
        ("task_variables", {"N": "x" * 131_070}, "N is 131,072 bytes, Linux takes 131,071 of one"),
        (
            "options",
            [BackendOption(name="a", about="b", kind="choice")],
            "choices are for kind='choice'",
        ),
        ("options", [BackendOption(name="a", about="b", kind="integer")], "is no option"),
        ("options", None, "'None' is no option"),
        ("options", [BackendOption(name="UPPER", about="b")], "'UPPER' can never be given"),
        ("options", [BackendOption(name="bucket_mb", about="b")], "'bucket_mb' can never be given"),
        ("options", [BackendOption(name="a b", about="b")], "'a b' can never be given"),
        ("options", [BackendOption(name="b=c", about="b")], "'b=c' can never be given"),
        (
            "options",
            [BackendOption(name="a", about="b"), BackendOption(name="a", about="c")],
            "two options are called a",
        ),
        (
            "options",
            [BackendOption(name="a", about="b", metavar=3)],
            "a line of text is needed, not '3'",
        ),
        (
            "options",
            [BackendOption(name="a", about="b", kind="choice", choices=(1, 2))],
            "'1' is no text",
        ),
        (
            "options",
            [BackendOption(name="a", about="b", kind="choice", choices=("x", "X"))],
            "a: two choices differ in",
        ),
        (
            "needed",
            (Requirement(module="m", package=None),),
            "a line of text is needed, not 'None'",
        ),
        ("sized", None, "TrainOptions are needed"),
        ("needed", ("torch",), "is no Requirement"),
    ],
)
def test_what_a_method_gives_is_looked_at(method, value, said):
    kind = made(**{method: value if method == "notes" else of_class(method, lambda *_: value)})
    with pytest.raises(ConfigError, match=r"their-package is at fault: Theirs\.") as caught:
        asked(kind, method)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"about": ""}, "Theirs.about: a line of text is needed"),
        ({"about": "two\nlines"}, "Theirs.about: a line of text is needed"),
        ({"name": "otherone"}, "Theirs calls itself 'otherone'"),
        ({"requires": ("torch",)}, "Theirs.requires: "),
        ({"usual": ("file",)}, "Theirs.usual: a mapping is needed"),
        ({"usual": {"config": ("$HOME/file", "")}}, "Theirs.usual: a list of files is needed"),
        ({"worker_ports": -1}, "Theirs.worker_ports: "),
        (
            {"shared_memory": "a_{address}_{port}"},
            "Theirs.shared_memory: a tuple of texts is needed",
        ),
        ({"shared_memory": ("a_{port}_{rank}",)}, "is no name with {address} and {port} in it"),
        ({"shared_memory": ("a_{address}_{uid}",)}, "is no name with {address} and {port} in it"),
        ({"shared_memory": ("a/{address}_{port}",)}, "is no name with {address} and {port} in it"),
        (
            {"shared_memory": ("a_{address}_{port}_{pid}",)},
            "is no name with {address} and {port} in it",
        ),
        (
            {"shared_memory": ("a_{address}_{port}_{",)},
            "is no name with {address} and {port} in it",
        ),
        (
            {"shared_memory": ("a_{address}_{port!r}_{port}",)},
            "is no name with {address} and {port} in it",
        ),
    ],
)
def test_a_class_that_is_no_whole_backend_is_refused(body, said):
    with pytest.raises(
        ConfigError, match="--backend 'good': their-package is at fault: "
    ) as caught:
        made(**body)
    assert said in caught.value.message


def test_a_good_one_is_left_as_it_is():
    names = ("a_{uid}_{address}:{port}.{rank}", "{port}{address}")
    kind = made(job_variables=lambda self, topology: {"A": "b"}, shared_memory=names)
    assert kind.shared_memory == names
    assert kind({}, {}).job_variables(ONE) == {"A": "b"}
    assert kind.options() == ()
    assert issubclass(kind, Good)
