"""Exhaustive matching, which the standard library has only from 3.11."""

from __future__ import annotations

from typing import NoReturn


def assert_never(value: NoReturn) -> NoReturn:
    """Mark what cannot be reached: type checkers refuse a ``match`` that forgets a case."""
    raise AssertionError(f"unexpected {value!r}")
