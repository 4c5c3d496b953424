"""Check what backends of other packages return and raise.

An error names the package. Our own backends skip these checks; ``tests/contract/test_backends.py``
applies them.
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

_MakeError = Callable[[str], BackendError]
"""Makes an error that names the package."""
_Check = Callable[[Any], str | None]
"""Returns the fault of a value; None if it is valid."""


def load_entry_point(point: EntryPoint, error: _MakeError) -> object:
    """Import and return the object that an entry point names.

    An exception becomes ``error``. Output, also of child processes and C libraries, goes to stderr.
    """
    with _stdout_as_stderr(), _foreign_code(error, refusals=()):
        found: object = point.load()
    return found


def checked_backend(kind: type[Backend], name: str, package: str) -> type[Backend]:
    """Return a subclass whose methods check what the backend returns and raises.

    Raises BackendError if a class attribute is missing or invalid.
    """
    hint = (
        f"report this to the authors of {printable(package)}; "
        "distlaunch.backends.base.Backend documents what each method returns"
    )

    def error(problem: str) -> BackendError:
        message = f"error in {printable(package)}: {kind.__name__}{printable(problem)}"
        return BackendError(name, message, hint=hint)

    def checked_method(method: str, check: _Check, *, is_value: bool = False) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            with _foreign_code(lambda problem: error(f".{method}: {problem}")):
                found = getattr(super(subclass, self), method)
                result = found if is_value else found(*args, **named)
                problem = check(result)
            if problem is not None:
                raise error(f".{method}: {problem}")
            return result

        return call

    body: dict[str, Any] = {
        method: checked_method(method, check) for method, check in _METHODS.items()
    }
    body["notes"] = property(checked_method("notes", _check_texts, is_value=True))
    body.update(
        {
            method: classmethod(checked_method(method, check))
            for method, check in _CLASS_METHODS.items()
        }
    )
    with _foreign_code(lambda problem: error(f": {problem}")):
        for attribute, check in _ATTRIBUTES.items():
            problem = check(getattr(kind, attribute, None))
            if problem is not None:
                raise error(f".{attribute}: {problem}")
        if kind.name != name:
            raise error(f" is named {quoted(kind.name)}")
        subclass = types.new_class(
            kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(body)
        )
    return subclass


@contextmanager
def _foreign_code(
    error: _MakeError, *, refusals: tuple[type[Exception], ...] = (LaunchError,)
) -> Iterator[None]:
    """Run the block as code of another package: exceptions except ``refusals`` become errors that
    name the package, also ``sys.exit``.

    After Ctrl-C, KeyboardInterrupt is raised even if the code catches it; a KeyboardInterrupt
    without Ctrl-C is an error of the code. Output goes to stderr.
    """
    interrupts: list[int] = []

    def interrupt(signum: int, frame: types.FrameType | None) -> None:
        interrupts.append(signum)
        signal.default_int_handler(signum, frame)

    # If another handler is installed (a running job), or in another thread, the user's Ctrl-C does
    # not raise KeyboardInterrupt here.
    is_handled = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    try:
        if is_handled:
            signal.signal(signal.SIGINT, interrupt)
        with redirect_stdout(sys.stderr):
            yield
    except BaseException as exc:
        if interrupts:
            raise KeyboardInterrupt from None
        if isinstance(exc, refusals):
            raise
        raise error(_describe_exception(exc)) from exc
    finally:
        if is_handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        raise KeyboardInterrupt


def _describe_exception(exc: BaseException) -> str:
    name = type(exc).__name__
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001 - __str__ of another package's exception may raise anything
        return name
    return f"{name}: {text}" if text else name


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Redirect descriptor 1 to stderr. Not while a job runs: the console writes to it from a
    thread."""
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


def _check_text(value: Any) -> str | None:
    is_line = isinstance(value, str) and value and value.isprintable()
    return None if is_line else f"a line of text is needed, not {quoted(repr(value))}"


def _check_texts(values: Any) -> str | None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        return f"a list of texts is needed, not {quoted(repr(values))}"
    return next(
        (f"{quoted(repr(each))} is not text" for each in values if not _is_text(each)), None
    )


def _check_arguments(values: Any) -> str | None:
    return _check_texts(values) or next(
        (problem for each in values if (problem := _check_length(quoted(each), each))), None
    )


def _check_length(what: str, text: str) -> str | None:
    from distlaunch.planning.environment import MOST_BYTES, byte_length

    length = byte_length(text)
    message = (
        f"{what} is {length:,} bytes, but Linux allows {MOST_BYTES:,} for an argument "
        "or variable (NAME=VALUE)"
    )
    return message if length > MOST_BYTES else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _check_variables(values: Any) -> str | None:
    if not isinstance(values, Mapping):
        return f"a mapping is needed, not {quoted(repr(values))}"
    for name, value in values.items():
        if not (_is_text(name) and name and "=" not in name):
            return f"{quoted(repr(name))} is not a name of a variable"
        if not _is_text(value):
            return f"the value of {name} is {quoted(repr(value))}, text without NUL is needed"
        if name in SET_FOR_WORKERS:
            return f"{name} is set by distlaunch"
    return None


def _check_own_variables(values: Any) -> str | None:
    problem = _check_variables(values)
    texts = () if problem else ((name, f"{name}={value}") for name, value in values.items())
    return problem or next((problem for each in texts if (problem := _check_length(*each))), None)


def _check_files(values: Any) -> str | None:
    outside = (
        file
        for file in values.values()
        if _is_text(file) and ("/" in file or file in ("", ".", ".."))
    )
    return _check_variables(values) or next(
        (f"{quoted(file)} is not a file in the attempt's folder" for file in outside), None
    )


def _check_options(values: Any) -> str | None:
    names: set[str] = set()
    for option in _as_sequence(values):
        if not isinstance(option, BackendOption) or option.kind not in get_args(Kind):
            return f"{quoted(repr(option))} is not a BackendOption"
        problem = (
            _check_text(option.name)
            or _check_text(option.about)
            or (option.metavar and _check_text(option.metavar))
            or None
        )
        if problem is not None:
            return problem
        if option_name(option.name) != option.name or " " in option.name:
            why = "names have lower case letters, with - between words"
            return f"{quoted(option.name)} is not a valid name: {why}"
        if option.name in names:
            return f"two options are called {option.name}"
        names.add(option.name)
        problem = _check_choices(option)
        if problem is not None:
            return f"{option.name}: {problem}"
    return None


def _check_choices(option: BackendOption) -> str | None:
    if bool(option.choices) != (option.kind == "choice"):
        return "choices are for kind='choice'"
    problem = _check_texts(option.choices) or next(
        filter(None, map(_check_text, option.choices)), None
    )
    if problem is not None:
        return problem
    is_distinct = len({choice.lower() for choice in option.choices}) == len(option.choices)
    return None if is_distinct else "two choices differ only in case"


def _check_usual_files(values: Any) -> str | None:
    if not isinstance(values, Mapping):
        return f"a mapping is needed, not {quoted(repr(values))}"
    strange = (places for places in values.values() if _check_texts(places) or "" in places)
    return next(
        (f"a list of files is needed, not {quoted(repr(places))}" for places in strange), None
    )


def _check_requirements(values: Any) -> str | None:
    for each in _as_sequence(values):
        if not isinstance(each, Requirement):
            return f"{quoted(repr(each))} is not a Requirement"
        problem = _check_text(each.module) or _check_text(each.package)
        if problem is not None:
            return problem
    return None


def _as_sequence(values: Any) -> Sequence[Any]:
    return values if isinstance(values, Sequence) else [values]


def _check_sized(value: Any) -> str | None:
    from distlaunch.planning.train_options import TrainOptions

    return (
        None
        if isinstance(value, TrainOptions)
        else f"TrainOptions are needed, not {quoted(repr(value))}"
    )


def _accept_any(_: Any) -> None:
    return None


def _check_bool(value: Any) -> str | None:
    return None if isinstance(value, bool) else "True or False is needed"


def _check_port_count(value: Any) -> str | None:
    return (
        None
        if type(value) is int and 0 <= value <= _MAX_PORTS
        else f"a number from 0 to {_MAX_PORTS} is needed"
    )


def _check_shared_memory(names: Any) -> str | None:
    if not isinstance(names, tuple):
        return f"a tuple of texts is needed, not {quoted(repr(names))}"
    strange = (name for name in names if not (_is_text(name) and _OWN_NAME.fullmatch(name)))
    return next(
        (
            f"{quoted(repr(name))} is not a name with {{address}} and {{port}} in it"
            for name in strange
        ),
        None,
    )


_OWN_NAME = re.compile(r"(?=.*\{address\})(?=.*\{port\})(?:[^{}/]|\{(?:uid|address|port|rank)\})+")
_MAX_PORTS = 16
_ATTRIBUTES: Mapping[str, _Check] = {
    "name": _check_text,
    "about": _check_text,
    "requires": _check_requirements,
    "usual": _check_usual_files,
    "store": _check_bool,
    "worker_ports": _check_port_count,
    "shared_memory": _check_shared_memory,
    "ipv4_only": lambda value: None if value == "" else _check_text(value),
}
_METHODS: Mapping[str, _Check] = {
    "__init__": _accept_any,
    "sized": _check_sized,
    "location": _accept_any,
    "needed": _check_requirements,
    "agreed": _accept_any,
    "notes_on": _check_texts,
    "notes_on_script": _check_texts,
    "check": _accept_any,
    "check_files": _accept_any,
    "check_nodes": _accept_any,
    "script_words": _check_arguments,
    "worker_words": _check_arguments,
    "job_variables": _check_variables,
    "default_variables": _check_variables,
    "unwanted": _check_texts,
    "node_variables": _check_own_variables,
    "worker_variables": _check_own_variables,
    "repeated": _check_variables,
    "cluster_variables": _check_variables,
    "task_variables": _check_own_variables,
    "fewer_workers": _check_text,
    "attempt_files": _check_files,
}
_CLASS_METHODS: Mapping[str, _Check] = {"options": _check_options, "env_files": _check_texts}
