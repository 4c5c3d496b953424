from __future__ import annotations

import json

import pytest

from distlaunch.backends.registry import find_backend
from distlaunch.core.model.variables import BACKEND_OPTIONS
from distlaunch.toolkit.toolkit_error import ToolkitError
from distlaunch.toolkit.wrap_options import (
    WrapOptions,
    launched_options,
    strategy_of_backend,
    wrap_options,
)

OF_THE_LAUNCHER_ALONE = {"nccl-debug", "flight-recorder", "dump-pipe"}
JOB = {"DISTLAUNCH_JOB_ID": "j"}


@pytest.mark.parametrize(
    ("backend", "strategy"),
    [
        (None, "ddp"),
        ("pytorch-ddp", "ddp"),
        ("ray", "ddp"),
        ("third", "ddp"),
        ("fsdp", "fsdp"),
        ("horovod", "horovod"),
    ],
)
def test_the_backend_determines_the_strategy(backend, strategy):
    assert (
        strategy_of_backend({} if backend is None else {"DISTLAUNCH_BACKEND": backend}) == strategy
    )


@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp"])
def test_each_option_of_our_torch_backends_is_understood_as_they_pass_it_on(backend):
    ours = [
        each for each in find_backend(backend).options() if each.name not in OF_THE_LAUNCHER_ALONE
    ]
    values = {"flag": True, "count": 3, "seconds": 4.0, "text": "A,B"}
    for option in ours:
        for value in option.choices or (values[option.kind],):
            given = {BACKEND_OPTIONS: json.dumps({option.name: value})}
            assert launched_options(given) == {option.name: value}, option.name


def test_horovods_compression_is_accepted():
    (option,) = (each for each in find_backend("horovod").options() if each.name == "compression")
    for choice in option.choices:
        assert wrap_options({"compression": choice}, {}) == WrapOptions(compression=choice)


def test_the_launchers_options_override_the_scripts():
    given = {BACKEND_OPTIONS: '{"sharding": "grad", "collective-timeout": 5.0}'}
    found = wrap_options({"sharding": "hybrid", "wrap_classes": "Block"}, given)
    assert found == WrapOptions(sharding="grad", wrap_classes="Block")


def test_options_that_the_toolkit_does_not_know_are_ignored_under_a_launcher():
    given = {BACKEND_OPTIONS: '{"nccl-debug": "info", "bucket-mb": 8}'}
    assert launched_options(given | JOB) == {"bucket-mb": 8}
    with pytest.raises(ToolkitError, match="nccl-debug: "):
        launched_options(given)
