from __future__ import annotations

import pytest

from distlaunch.toolkit.checkpoint.entries import (
    CLASSES,
    TIED,
    GroupEntry,
    ModelEntry,
    OtherEntry,
    ParameterStateEntry,
    PartEntry,
    entry_at,
    is_written,
    worker_key,
)


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        (("model", "a.weight"), ModelEntry(name="a.weight", is_whole=True)),
        (("model", "_extra_state", "x", 0), ModelEntry(name="_extra_state", is_whole=False)),
        (
            ("optimizer", "state", "a", "step"),
            ParameterStateEntry(parameter="a", key="step", is_whole=True),
        ),
        (
            ("optimizer", "state", "a", 0, "x"),
            ParameterStateEntry(parameter="a", key=0, is_whole=False),
        ),
        (
            ("optimizer", "param_groups", 1, "lr"),
            GroupEntry(group=1, key="lr", is_whole=True),
        ),
        (
            ("optimizer", "param_groups", 0, "betas", 1),
            GroupEntry(group=0, key="betas", is_whole=False),
        ),
        (("parts", "average", "('a',)"), PartEntry(part="average", place="('a',)")),
        (("tied",), TIED),
        (("classes",), CLASSES),
        (("worker-3",), OtherEntry(name="worker-3", is_whole=True)),
    ],
)
def test_a_path_that_a_save_writes_has_its_entry(path, entry):
    assert entry_at(path) == entry
    assert is_written(entry)


@pytest.mark.parametrize(
    "path",
    [
        ("model",),
        ("model", 0),
        ("optimizer",),
        ("optimizer", "state", "a"),
        ("optimizer", "state", 0, "step"),
        ("optimizer", "param_groups", "0", "lr"),
        ("optimizer", "other", "a", "step"),
        ("parts", "average"),
        ("parts", "average", "a", "b"),
    ],
)
def test_a_path_that_no_save_writes_is_recognised(path):
    assert not is_written(entry_at(path))


def test_a_tied_path_with_more_elements_is_not_the_list_of_tied_parameters():
    assert entry_at(("tied", 0)) != TIED


@pytest.mark.parametrize(("rank", "saved", "key"), [(1, 2, "worker-1"), (2, 2, "worker-0")])
def test_a_worker_beyond_the_saved_ones_reads_rank_0s_entry(rank, saved, key):
    assert worker_key(rank, saved) == key
