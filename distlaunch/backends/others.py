"""Layer backends: another package's backend, held to what one promises: a fault of its own is named as that.

Ours are held to the same by their tests (``tests/contract/test_backends.py``), and cost nothing here.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from distlaunch.backends.base import Backend, BackendOption, Kind, Requirement
from distlaunch.core.errors import ConfigError, LaunchError
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.model.variables import SET_FOR_WORKERS

_Check = Callable[[Any], str | None]
"""Says what is wrong with a value; None if nothing."""


def guarded(kind: type[Backend], name: str, package: str) -> type[Backend]:
    """Give a backend as one whose methods raise nothing but our errors, and give what they promise to.

    ``name``: by which it is found. Raises ConfigError for a class that lacks what every backend has.
    """
    hint = f"tell the makers of {printable(package)}: distlaunch.backends.base.Backend says what each method gives"
    for attribute, check in _ATTRIBUTES.items():
        problem = check(getattr(kind, attribute, None))
        if problem is not None:
            said = f"{printable(package)} is at fault: {kind.__name__}.{attribute}: {problem}"
            raise ConfigError(f"--backend {quoted(name)}: {said}", hint=hint)
    if kind.name != name:
        said = f"{printable(package)} is at fault: {kind.__name__} calls itself {quoted(kind.name)}"
        raise ConfigError(f"--backend {quoted(name)}: {said}", hint=hint)

    def held(method: str, check: _Check, *, is_value: bool = False) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            try:
                found = getattr(super(made, self), method)
                result = found if is_value else found(*args, **named)
                problem = check(result)
            except LaunchError:
                raise
            except Exception as exc:
                raise fault(method, f"{type(exc).__name__}: {exc}") from exc
            if problem is not None:
                raise fault(method, problem)
            return result

        return call

    def fault(method: str, problem: str) -> ConfigError:
        said = f"{printable(package)} is at fault: {kind.__name__}.{method}: {printable(problem)}"
        return ConfigError(f"--backend {name}: {said}", hint=hint)

    body: dict[str, Any] = {method: held(method, check) for method, check in _METHODS.items()}
    body["notes"] = property(held("notes", _texts, is_value=True))
    body.update({method: classmethod(held(method, check)) for method, check in _OF_CLASS.items()})
    made = types.new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(body))
    return made


def _text(value: Any) -> str | None:
    is_line = isinstance(value, str) and value and value.isprintable()
    return None if is_line else f"a line of text is needed, not {quoted(repr(value))}"


def _texts(values: Any) -> str | None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        return f"a list of texts is needed, not {quoted(repr(values))}"
    return next((f"{quoted(repr(each))} is no text" for each in values if not _is_word(each)), None)


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


def _files(values: Any) -> str | None:
    outside = (file for file in values.values() if _is_word(file) and ("/" in file or file in ("", ".", "..")))
    return _variables(values) or next((f"{quoted(file)} is no file in the attempt's folder" for file in outside), None)


def _options(values: Any) -> str | None:
    for option in _listed(values):
        if not isinstance(option, BackendOption) or option.kind not in get_args(Kind):
            return f"{quoted(repr(option))} is no option"
        if bool(option.choices) != (option.kind == "choice"):
            return f"{option.name}: choices are for kind='choice'"
        problem = _text(option.name) or _text(option.about)
        if problem is not None:
            return problem
    return None


def _requirements(values: Any) -> str | None:
    return next(
        (f"{quoted(repr(each))} is no Requirement" for each in _listed(values) if not isinstance(each, Requirement)),
        None,
    )


def _listed(values: Any) -> Sequence[Any]:
    return values if isinstance(values, Sequence) else [values]


def _sized(value: Any) -> str | None:
    from distlaunch.resolve.options import TrainOptions

    return None if isinstance(value, TrainOptions) else f"TrainOptions are needed, not {quoted(repr(value))}"


def _anything(_: Any) -> None:
    return None


def _switch(value: Any) -> str | None:
    return None if isinstance(value, bool) else "True or False is needed"


def _count(value: Any) -> str | None:
    return None if type(value) is int and 0 <= value <= _MOST_PORTS else f"a number from 0 to {_MOST_PORTS} is needed"


def _shared_memory(names: Any) -> str | None:
    if not isinstance(names, tuple):
        return f"a tuple of texts is needed, not {quoted(repr(names))}"
    strange = (name for name in names if not (_is_word(name) and _OWN_NAME.fullmatch(name)))
    return next((f"{quoted(repr(name))} is no name with {{address}} and {{port}} in it" for name in strange), None)


_OWN_NAME = re.compile(r"(?=.*\{address\})(?=.*\{port\})(?:[^{}/]|\{(?:uid|address|port|rank)\})+")
_MOST_PORTS = 16
_ATTRIBUTES: Mapping[str, _Check] = {
    "name": _text, "about": _text, "requires": _requirements, "store": _switch, "worker_ports": _count,
    "shared_memory": _shared_memory,
    "ipv4_only": lambda value: None if value == "" else _text(value),
}  # fmt: skip
_METHODS: Mapping[str, _Check] = {
    "__init__": _anything, "sized": _sized, "location": _anything, "needed": _requirements, "agreed": _anything,
    "notes_on": _texts, "check": _anything, "check_files": _anything, "check_meeting": _anything,
    "script_words": _texts, "worker_words": _texts,
    "job_variables": _variables, "default_variables": _variables, "unwanted": _texts, "node_variables": _variables,
    "worker_variables": _variables, "repeated": _variables, "cluster_variables": _variables,
    "task_variables": _variables, "fewer_workers": _text, "attempt_files": _files,
}  # fmt: skip
_OF_CLASS: Mapping[str, _Check] = {"options": _options, "env_files": _texts}
