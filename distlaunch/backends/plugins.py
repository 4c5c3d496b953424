"""Another package's backend, held to what one promises: a fault of its own is named as that.

Ours are held to the same by their tests (``tests/contract/test_backends.py``), and cost nothing
here.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, get_args

from distlaunch.backends.base import (
    Backend,
    BackendError,
    BackendOption,
    Kind,
    Requirement,
    option_name,
)
from distlaunch.core.errors import LaunchError
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.model.variables import SET_FOR_WORKERS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_Fault = Callable[[str], BackendError]
"""Makes the error that names a package, of what its code has done."""
_Check = Callable[[Any], str | None]
"""Says what is wrong with a value; None if nothing."""


def loaded(point: EntryPoint, fault: _Fault) -> object:
    """Import what an entry point names; what the import prints, or a child or a library in C, goes
    to stderr."""
    with _stdout_as_stderr(), _theirs(fault, refusals=()):
        found: object = point.load()
    return found


def guarded(kind: type[Backend], name: str, package: str) -> type[Backend]:
    """Return a backend as one whose methods raise nothing but our errors, and give what they promise
    to.

    ``name``: by which it is found. Raises BackendError for a class that lacks what every
    backend has.
    """
    hint = (
        f"tell the makers of {printable(package)}: distlaunch.backends.base.Backend says what "
        "each method gives"
    )

    def fault(problem: str) -> BackendError:
        said = f"{printable(package)} is at fault: {kind.__name__}{printable(problem)}"
        return BackendError(name, said, hint=hint)

    def held(method: str, check: _Check, *, is_value: bool = False) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            with _theirs(lambda problem: fault(f".{method}: {problem}")):
                found = getattr(super(made, self), method)
                result = found if is_value else found(*args, **named)
                problem = check(result)
            if problem is not None:
                raise fault(f".{method}: {problem}")
            return result

        return call

    body: dict[str, Any] = {method: held(method, check) for method, check in _METHODS.items()}
    body["notes"] = property(held("notes", _texts, is_value=True))
    body.update({method: classmethod(held(method, check)) for method, check in _OF_CLASS.items()})
    with _theirs(lambda problem: fault(f": {problem}")):
        for attribute, check in _ATTRIBUTES.items():
            problem = check(getattr(kind, attribute, None))
            if problem is not None:
                raise fault(f".{attribute}: {problem}")
        if kind.name != name:
            raise fault(f" calls itself {quoted(kind.name)}")
        made = types.new_class(
            kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(body)
        )
    return made


@contextmanager
def _theirs(
    fault: _Fault, *, refusals: tuple[type[Exception], ...] = (LaunchError,)
) -> Iterator[None]:
    """Run code of another package's: whatever it raises but ``refusals`` is its fault, ``sys.exit``
    and the like too.

    A Ctrl-C of the user's stays one, whatever the code makes of it; KeyboardInterrupt without one
    is a fault as any other. What the code prints goes to stderr: stdout has what was asked for, and
    no more.
    """
    pressed: list[int] = []

    def interrupt(signum: int, frame: types.FrameType | None) -> None:
        pressed.append(signum)
        signal.default_int_handler(signum, frame)

    # Where others answer Ctrl-C (a running job), or where no signal comes, no KeyboardInterrupt is
    # the user's.
    is_awaited = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    try:
        if is_awaited:
            signal.signal(signal.SIGINT, interrupt)
        with redirect_stdout(sys.stderr):
            yield
    except BaseException as exc:
        if pressed:
            raise KeyboardInterrupt from None
        if isinstance(exc, refusals):
            raise
        raise fault(_said(exc)) from exc
    finally:
        if is_awaited:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


def _said(exc: BaseException) -> str:
    name = type(exc).__name__
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001 - an exception of theirs, which may raise whatever it likes
        return name
    return f"{name}: {text}" if text else name


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Have descriptor 1 lead to stderr. For the time before a job alone: the console writes to it
    from a thread."""
    stdout = sys.stdout
    stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        try:
            yield
        finally:
            stdout.flush()
            os.dup2(kept, 1)
    finally:
        os.close(kept)


def _text(value: Any) -> str | None:
    is_line = isinstance(value, str) and value and value.isprintable()
    return None if is_line else f"a line of text is needed, not {quoted(repr(value))}"


def _texts(values: Any) -> str | None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        return f"a list of texts is needed, not {quoted(repr(values))}"
    return next((f"{quoted(repr(each))} is no text" for each in values if not _is_word(each)), None)


def _arguments(values: Any) -> str | None:
    return _texts(values) or next(
        (problem for each in values if (problem := _too_long(quoted(each), each))), None
    )


def _too_long(what: str, text: str) -> str | None:
    from distlaunch.planning.environment import MOST_BYTES, byte_length

    length = byte_length(text)
    said = (
        f"{what} is {length:,} bytes, Linux takes {MOST_BYTES:,} of one argument or variable "
        "(NAME=VALUE)"
    )
    return said if length > MOST_BYTES else None


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _variables(values: Any) -> str | None:
    if not isinstance(values, Mapping):
        return f"a mapping is needed, not {quoted(repr(values))}"
    for name, value in values.items():
        if not (_is_word(name) and name and "=" not in name):
            return f"{quoted(repr(name))} is no name of a variable"
        if not _is_word(value):
            return f"the value of {name} is {quoted(repr(value))}, text without NUL is needed"
        if name in SET_FOR_WORKERS:
            return f"{name} is distlaunch's to set"
    return None


def _own_variables(values: Any) -> str | None:
    problem = _variables(values)
    texts = () if problem else ((name, f"{name}={value}") for name, value in values.items())
    return problem or next((problem for each in texts if (problem := _too_long(*each))), None)


def _files(values: Any) -> str | None:
    outside = (
        file
        for file in values.values()
        if _is_word(file) and ("/" in file or file in ("", ".", ".."))
    )
    return _variables(values) or next(
        (f"{quoted(file)} is no file in the attempt's folder" for file in outside), None
    )


def _options(values: Any) -> str | None:
    names: set[str] = set()
    for option in _listed(values):
        if not isinstance(option, BackendOption) or option.kind not in get_args(Kind):
            return f"{quoted(repr(option))} is no option"
        problem = (
            _text(option.name)
            or _text(option.about)
            or (option.metavar and _text(option.metavar))
            or None
        )
        if problem is not None:
            return problem
        if option_name(option.name) != option.name or " " in option.name:
            why = "-o takes names in small letters, with - between their words"
            return f"{quoted(option.name)} can never be given: {why}"
        if option.name in names:
            return f"two options are called {option.name}"
        names.add(option.name)
        problem = _choices(option)
        if problem is not None:
            return f"{option.name}: {problem}"
    return None


def _choices(option: BackendOption) -> str | None:
    if bool(option.choices) != (option.kind == "choice"):
        return "choices are for kind='choice'"
    problem = _texts(option.choices) or next(filter(None, map(_text, option.choices)), None)
    if problem is not None:
        return problem
    is_told_apart = len({choice.lower() for choice in option.choices}) == len(option.choices)
    return None if is_told_apart else "two choices differ in capital letters at most"


def _usual(values: Any) -> str | None:
    if not isinstance(values, Mapping):
        return f"a mapping is needed, not {quoted(repr(values))}"
    strange = (places for places in values.values() if _texts(places) or "" in places)
    return next(
        (f"a list of files is needed, not {quoted(repr(places))}" for places in strange), None
    )


def _requirements(values: Any) -> str | None:
    for each in _listed(values):
        if not isinstance(each, Requirement):
            return f"{quoted(repr(each))} is no Requirement"
        problem = _text(each.module) or _text(each.package)
        if problem is not None:
            return problem
    return None


def _listed(values: Any) -> Sequence[Any]:
    return values if isinstance(values, Sequence) else [values]


def _sized(value: Any) -> str | None:
    from distlaunch.planning.train_options import TrainOptions

    return (
        None
        if isinstance(value, TrainOptions)
        else f"TrainOptions are needed, not {quoted(repr(value))}"
    )


def _anything(_: Any) -> None:
    return None


def _switch(value: Any) -> str | None:
    return None if isinstance(value, bool) else "True or False is needed"


def _count(value: Any) -> str | None:
    return (
        None
        if type(value) is int and 0 <= value <= _MOST_PORTS
        else f"a number from 0 to {_MOST_PORTS} is needed"
    )


def _shared_memory(names: Any) -> str | None:
    if not isinstance(names, tuple):
        return f"a tuple of texts is needed, not {quoted(repr(names))}"
    strange = (name for name in names if not (_is_word(name) and _OWN_NAME.fullmatch(name)))
    return next(
        (
            f"{quoted(repr(name))} is no name with {{address}} and {{port}} in it"
            for name in strange
        ),
        None,
    )


_OWN_NAME = re.compile(r"(?=.*\{address\})(?=.*\{port\})(?:[^{}/]|\{(?:uid|address|port|rank)\})+")
_MOST_PORTS = 16
_ATTRIBUTES: Mapping[str, _Check] = {
    "name": _text,
    "about": _text,
    "requires": _requirements,
    "usual": _usual,
    "store": _switch,
    "worker_ports": _count,
    "shared_memory": _shared_memory,
    "ipv4_only": lambda value: None if value == "" else _text(value),
}
_METHODS: Mapping[str, _Check] = {
    "__init__": _anything, "sized": _sized, "location": _anything, "needed": _requirements, "agreed": _anything,
    "notes_on": _texts, "notes_on_script": _texts,
    "check": _anything, "check_files": _anything, "check_meeting": _anything,
    "script_words": _arguments, "worker_words": _arguments,
    "job_variables": _variables, "default_variables": _variables, "unwanted": _texts, "node_variables": _own_variables,
    "worker_variables": _own_variables, "repeated": _variables, "cluster_variables": _variables,
    "task_variables": _own_variables, "fewer_workers": _text, "attempt_files": _files,
}  # fmt: skip
_OF_CLASS: Mapping[str, _Check] = {"options": _options, "env_files": _texts}
