"""Base class for immutable data: frozen, slotted, keyword-only, and cheap at start-up.

``@dataclass`` compiles several functions for each class, about 0.8 ms, and imports ``inspect``. A
subclass of ``Record`` costs 0.02 ms, because all share one ``__init__``. Type checkers treat a
record as a dataclass (PEP 681). After 500 instances a class gets a compiled ``__init__``, three
times as fast: jobs with thousands of nodes create many messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[type], type]:
        """Replace, at run time, the decorator that only type checkers need."""
        return lambda cls: cls


R = TypeVar("R", bound="Record")
_MANY = 500


@dataclass_transform(kw_only_default=True, frozen_default=True)
class _RecordType(type):
    """Metaclass: turns the annotations of a class body into slots and its values into defaults."""

    _fields: dict[str, str]
    _defaults: dict[str, object]
    _hidden: frozenset[str]
    _made: list[int]

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        hide: tuple[str, ...] = (),
    ) -> _RecordType:
        own: dict[str, str] = namespace.get("__annotations__", {})
        defaults = {field: namespace.pop(field) for field in own if field in namespace}
        namespace["__slots__"] = tuple(own)
        cls = super().__new__(mcs, name, bases, namespace)
        parents = [base for base in bases if isinstance(base, _RecordType)]
        cls._fields = {
            field: kind for base in parents for field, kind in base._fields.items()
        } | own
        cls._defaults = {
            field: value
            for base in parents
            for field, value in base._defaults.items()  # noqa: SLF001 - our own
        } | defaults
        cls._made = [0]
        if "__init__" not in namespace:
            cls.__init__ = _shared_init  # type: ignore[misc]  # its own entry, so that no subclass gets a parent's
        cls._hidden = frozenset(hide).union(*(base._hidden for base in parents))  # noqa: SLF001
        return cls


def _shared_init(self: Record, **values: Any) -> None:
    """Initialise a record whose class has no compiled ``__init__`` yet."""
    cls = type(self)
    if len(values) != len(cls._fields) or not values.keys() <= cls._fields.keys():
        values = _complete_values(cls, values)
    write = object.__setattr__
    for field, value in values.items():
        write(self, field, value)
    self.__post_init__()
    made = cls._made
    made[0] += 1
    if made[0] == _MANY and cls.__dict__.get("__init__") is _shared_init:
        cls.__init__ = _init_of(cls)  # type: ignore[method-assign]


class Record(metaclass=_RecordType):
    """Base of immutable data. ``class A(Record, hide=("secret",))`` omits a field from ``repr``.

    ``__post_init__`` of a subclass may check values.
    """

    def __post_init__(self) -> None:
        """Raise an error for invalid values."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(a == b for a, b in zip(_field_values(self), _field_values(other), strict=True))

    def __hash__(self) -> int:
        return hash((type(self), *_field_values(self)))

    def __repr__(self) -> str:
        hidden = type(self)._hidden  # noqa: SLF001
        shown = (
            f"{field}={getattr(self, field)!r}"
            for field in type(self)._fields
            if field not in hidden
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _rebuild, (type(self), {field: getattr(self, field) for field in type(self)._fields})


def replace(record: R, **changes: object) -> R:
    """Return a copy of the record with some fields changed."""
    cls = type(record)
    return cls(**{**{field: getattr(record, field) for field in cls._fields}, **changes})


def fields_of(cls: type[Record]) -> dict[str, str]:
    """Return the fields in order, as name -> annotation in the source."""
    return dict(cls._fields)


def defaults_of(cls: type[Record]) -> dict[str, object]:
    """Return the defaults of the fields that have one."""
    return dict(cls._defaults)


def plain(value: object) -> object:
    """Return the value with records, mappings and tuples as dicts and lists, for JSON. Raises
    TypeError."""
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, Record):
        return {field: plain(getattr(value, field)) for field in type(value)._fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} is no plain data")


def assert_never(value: NoReturn) -> NoReturn:
    """Mark code that cannot be reached: type checkers report a ``match`` that omits a case."""
    raise AssertionError(f"unexpected {value!r}")


def _complete_values(cls: type[Record], values: dict[str, object]) -> dict[str, object]:
    whole = {**cls._defaults, **values}
    missing = [field for field in cls._fields if field not in whole]
    unknown = [field for field in values if field not in cls._fields]
    if missing or unknown:
        raise TypeError(f"{cls.__name__}: missing {missing}, unknown {unknown}")
    return whole


def _init_of(cls: type[Record]) -> Callable[..., None]:
    """Compile an ``__init__`` for one class."""
    space: dict[str, Any] = {f"_default_{field}": value for field, value in cls._defaults.items()}
    space |= {f"_write_{field}": getattr(cls, field).__set__ for field in cls._fields}
    given = "".join(
        f", {field}=_default_{field}" if field in cls._defaults else f", {field}"
        for field in cls._fields
    )
    lines = [f"def __init__(self{', *' if given else ''}{given}):", "    pass"]
    lines += [f"    _write_{field}(self, {field})" for field in cls._fields]
    if cls.__post_init__ is not Record.__post_init__:
        lines.append("    self.__post_init__()")
    exec("\n".join(lines), space)  # noqa: S102 - made of the names of fields alone
    made: Callable[..., None] = space["__init__"]
    return made


def _rebuild(cls: type[Record], values: dict[str, object]) -> object:
    return cls(**values)


def _field_values(record: Any) -> Iterator[object]:
    return (getattr(record, field) for field in type(record)._fields)
