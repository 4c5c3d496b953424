"""Backends of other packages that break the contract. The error names the package."""

from __future__ import annotations

import signal
import sys

import pytest

from distlaunch.backends.base import Backend, BackendOption, Requirement
from distlaunch.backends.plugins import checked_backend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from distlaunch.planning.backend import PlannedBackend

ONE = Topology(nodes=(Node(host="a", slots=1),), device="cpu")
ARGUMENTS = {
    "__init__": ({}, {}), "env_files": ({}, "/"), "sized": (None,), "location": (None, "a"), "needed": ({},),
    "notes_on": (ONE,), "notes_on_script": ("t.py", ""), "check": (ONE,), "check_files": ({}, None), "check_nodes": ((), ()), "job_variables": (ONE,),
    "default_variables": (ONE,), "node_variables": (ONE, 0), "worker_variables": (ONE, 0, 0, 0),
    "cluster_variables": ((),), "task_variables": (1, 0), "attempt_files": (ONE,), "worker_words": (0,),
    "options": (), "repeated": (), "script_words": (), "agreed": (), "notes": (),
    "unwanted": (), "fewer_workers": (),
}  # fmt: skip


class Good(Backend):
    name = "good"
    about = "does as it should"


def made(**body) -> type[Backend]:
    return checked_backend(type("Theirs", (Good,), body), "good", "their-package")


def of_class(method: str, function):
    return classmethod(function) if method in ("options", "env_files") else function


def asked(kind: type[Backend], method: str):
    if method in ("__init__", "options", "env_files"):
        return (kind if method == "__init__" else getattr(kind, method))(*ARGUMENTS[method])
    found = getattr(kind({}, {}), method)
    return found if method == "notes" else found(*ARGUMENTS[method])


def test_all_methods_are_checked():
    public = {
        name
        for kind in (Backend, PlannedBackend)
        for name, found in vars(kind).items()
        if callable(found)
    }
    public |= {"options", "env_files", "notes"}
    assert {name for name in public if not name.startswith("_")} | {"__init__"} == ARGUMENTS.keys()


@pytest.mark.parametrize("method", ARGUMENTS)
def test_exceptions_of_a_method_are_reported_with_the_package(method):
    def fail(*_):
        raise KeyError("x\n")

    kind = made(**{method: property(fail) if method == "notes" else of_class(method, fail)})
    with pytest.raises(ConfigError) as caught:
        asked(kind, method)
    assert caught.value.message == (
        f"--backend 'good': error in their-package: Theirs.{method}: KeyError: 'x\\n'"
    )
    assert "their-package" in str(caught.value.hint)


class Strange(BaseException):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (SystemExit(0), "SystemExit: 0"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Strange(), "Strange"),
    ],
    ids=["sys.exit", "a Ctrl-C that is none", "no text"],
)
@pytest.mark.parametrize("method", ["options", "job_variables"])
def test_no_method_ends_the_launcher(method, end, text):
    def finish(*_):
        raise end

    with pytest.raises(ConfigError) as caught:
        asked(made(**{method: of_class(method, finish)}), method)
    assert caught.value.message.endswith(f"error in their-package: Theirs.{method}: {text}")
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
def test_a_ctrl_c_ends_the_launcher_even_if_a_method_catches_it(answer):
    kind = made(agreed=lambda self: answer(), job_variables=lambda self, topology: self.agreed())
    with pytest.raises(KeyboardInterrupt):
        asked(kind, "job_variables")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_of_ctrl_c_is_left_in_place():
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(True))
    try:
        assert made(agreed=lambda self: pressed() or {})({}, {}).agreed() == {}
    finally:
        signal.signal(signal.SIGINT, before)
    assert received


def test_the_output_of_a_hook_is_not_on_stdout(capsys):
    made(agreed=lambda self: print("here") or {})({}, {}).agreed()
    assert capsys.readouterr() == ("", "here\n")


def test_a_class_that_cannot_be_subclassed_is_reported_with_its_package():
    class Final(Good):
        def __init_subclass__(cls):
            raise TypeError("no more")

    with pytest.raises(
        ConfigError, match="--backend 'good': error in their-package: Final: TypeError: no more"
    ):
        checked_backend(Final, "good", "their-package")


def test_config_errors_of_the_backend_stay_as_they_are():
    def refuse(self, topology):
        raise ConfigError("not so")

    with pytest.raises(ConfigError, match="not so"):
        made(check=refuse)({}, {}).check(ONE)


@pytest.mark.parametrize(
    ("method", "value", "text"),
    [
        ("job_variables", {"N": 3}, "the value of N is '3', text without NUL is needed"),
        ("worker_variables", {"N": "a\0b"}, "the value of N"),
        ("default_variables", {"A=B": ""}, "not a name of a variable"),
        ("node_variables", {"RANK": "1"}, "RANK is set by distlaunch"),
        ("cluster_variables", None, "a mapping is needed, not 'None'"),
        ("attempt_files", {"F": "../x"}, "not a file in the attempt's folder"),
        ("script_words", "--all", "a list of texts is needed"),
        ("notes", iter("ab"), "a list of texts is needed"),
        ("worker_words", (1,), "'1' is not text"),
        (
            "worker_words",
            ("--all", "x" * 131_072),
            "xxx'... is 131,072 bytes, but Linux allows 131,071 for an argument",
        ),
        (
            "script_words",
            ("x" * 3_000_000,),
            "xxx'... is 3,000,000 bytes, but Linux allows 131,071 for an argument",
        ),
        (
            "worker_variables",
            {"N": "x" * 131_070},
            "N is 131,072 bytes, but Linux allows 131,071 for an argument",
        ),
        (
            "node_variables",
            {"A": "b", "N": "x" * 131_070},
            "N is 131,072 bytes, but Linux allows 131,071 for an argument",
        ),
        (
            "task_variables",
            {"N": "x" * 131_070},
            "N is 131,072 bytes, but Linux allows 131,071 for an argument",
        ),
        (
            "options",
            [BackendOption(name="a", about="b", kind="choice")],
            "choices are for kind='choice'",
        ),
        ("options", [BackendOption(name="a", about="b", kind="integer")], "is not a BackendOption"),
        ("options", None, "'None' is not a BackendOption"),
        ("options", [BackendOption(name="UPPER", about="b")], "'UPPER' is not a valid name"),
        (
            "options",
            [BackendOption(name="bucket_mb", about="b")],
            "'bucket_mb' is not a valid name",
        ),
        ("options", [BackendOption(name="a b", about="b")], "'a b' is not a valid name"),
        ("options", [BackendOption(name="b=c", about="b")], "'b=c' is not a valid name"),
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
            "'1' is not text",
        ),
        (
            "options",
            [BackendOption(name="a", about="b", kind="choice", choices=("x", "X"))],
            "a: two choices differ only in case",
        ),
        (
            "needed",
            (Requirement(module="m", package=None),),
            "a line of text is needed, not 'None'",
        ),
        ("sized", None, "TrainOptions are needed"),
        ("needed", ("torch",), "is not a Requirement"),
    ],
)
def test_return_values_of_methods_are_checked(method, value, text):
    kind = made(**{method: value if method == "notes" else of_class(method, lambda *_: value)})
    with pytest.raises(ConfigError, match=r"error in their-package: Theirs\.") as caught:
        asked(kind, method)
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"about": ""}, "Theirs.about: a line of text is needed"),
        ({"about": "two\nlines"}, "Theirs.about: a line of text is needed"),
        ({"name": "otherone"}, "Theirs is named 'otherone'"),
        ({"requires": ("torch",)}, "Theirs.requires: "),
        ({"usual": ("file",)}, "Theirs.usual: a mapping is needed"),
        ({"usual": {"config": ("$HOME/file", "")}}, "Theirs.usual: a list of files is needed"),
        ({"worker_ports": -1}, "Theirs.worker_ports: "),
        (
            {"shared_memory": "a_{address}_{port}"},
            "Theirs.shared_memory: a tuple of texts is needed",
        ),
        ({"shared_memory": ("a_{port}_{rank}",)}, "is not a name with {address} and {port} in it"),
        (
            {"shared_memory": ("a_{address}_{uid}",)},
            "is not a name with {address} and {port} in it",
        ),
        (
            {"shared_memory": ("a/{address}_{port}",)},
            "is not a name with {address} and {port} in it",
        ),
        (
            {"shared_memory": ("a_{address}_{port}_{pid}",)},
            "is not a name with {address} and {port} in it",
        ),
        (
            {"shared_memory": ("a_{address}_{port}_{",)},
            "is not a name with {address} and {port} in it",
        ),
        (
            {"shared_memory": ("a_{address}_{port!r}_{port}",)},
            "is not a name with {address} and {port} in it",
        ),
    ],
)
def test_an_incomplete_backend_class_is_refused(body, text):
    with pytest.raises(ConfigError, match="--backend 'good': error in their-package: ") as caught:
        made(**body)
    assert text in caught.value.message


def test_a_valid_backend_works_unchanged():
    names = ("a_{uid}_{address}:{port}.{rank}", "{port}{address}")
    kind = made(job_variables=lambda self, topology: {"A": "b"}, shared_memory=names)
    assert kind.shared_memory == names
    assert kind({}, {}).job_variables(ONE) == {"A": "b"}
    assert kind.options() == ()
    assert issubclass(kind, Good)
