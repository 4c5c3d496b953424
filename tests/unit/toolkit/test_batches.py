from __future__ import annotations

import pickle

import numpy as np
import pytest

from tests.examples import examples

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.batches import StatefulBatchSampler
from distlaunch.toolkit.toolkit_error import ToolkitError


def sampler(rank, workers, samples, batch_size, **options):
    made = StatefulBatchSampler(range(samples), 1, **{"drop_last": False, **options})
    made._rank, made._workers, made._batch = rank, workers, batch_size
    return made


def snapshot(workers, samples, batch_size, batches, state=None):
    """Train on this many batches on all workers. Return the samples and the state."""
    everyone = [sampler(rank, workers, samples, batch_size) for rank in range(workers)]
    found = []
    for one in everyone:
        if state is not None:
            one.load_state_dict(state)
        for _, samples_of_batch in zip(range(batches), one, strict=False):
            found += samples_of_batch
            one.advance()
    assert len({str(one.state_dict()) for one in everyone}) == 1, (
        "the state is the same on all workers"
    )
    return found, everyone[0].state_dict()


@settings(deadline=None, max_examples=examples(25))
@given(
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    batch=st.integers(1, 4),
    samples=st.integers(1, 60),
    cut=st.data(),
)
def test_a_change_of_workers_within_an_epoch_loses_and_repeats_no_sample(
    before, after, batch, samples, cut
):
    number = -(-samples // (before * batch))
    stop = cut.draw(st.integers(0, number - 1))
    first, state = snapshot(before, samples, batch, stop)
    second, end = snapshot(after, samples, batch, 1000, state)
    assert set(first) | set(second) == set(range(samples))
    assert len(first) == len(set(first))
    assert not set(first) & set(second)
    assert len(second) - len(set(second)) < after, "only the last batch is filled up"
    assert (end["epoch"], end["position"]) == (1, 0)


def test_batches_fetched_ahead_do_not_count():
    data = TensorDataset(torch.arange(40))
    batches = StatefulBatchSampler(data, 4, seed=5)
    whole = [batch[0].tolist() for batch in DataLoader(data, batch_sampler=batches)]
    assert len(whole) == 10
    loader = iter(DataLoader(data, batch_sampler=batches, num_workers=2))
    for expected in whole[:3]:
        assert next(loader)[0].tolist() == expected
        batches.advance()
    del loader
    other = StatefulBatchSampler(data, 4, seed=5)
    other.load_state_dict(batches.state_dict())
    assert [batch[0].tolist() for batch in DataLoader(data, batch_sampler=other)] == whole[3:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("after_the_step", [False, True])
def test_the_length_marks_the_last_batch_after_a_resume(workers, after_the_step):
    batches = StatefulBatchSampler(range(10), 2)
    batches.load_state_dict({**batches.state_dict(), "position": 4})
    loader = DataLoader(range(10), batch_sampler=batches, num_workers=workers)
    assert len(loader) == 5, (
        "what is made of it now is of an epoch, as what was made before the resume"
    )
    for expected in (3, 5):
        lasts = []
        for number, _ in enumerate(loader, 1):
            if after_the_step:
                batches.advance()
            assert len(loader) == expected
            lasts.append(number == len(loader))
            if not after_the_step:
                batches.advance()
        assert lasts == [False] * (expected - 1) + [True]
        assert len(loader) == 5


def test_persistent_workers_keep_the_length_of_an_iteration_until_the_next_one():
    """A loop recognizes its last batch by the length only."""
    batches = StatefulBatchSampler(range(10), 2)
    batches.advance(2)
    loader = DataLoader(range(10), batch_sampler=batches, num_workers=1, persistent_workers=True)
    assert len(loader) == 5
    for expected in (3, 5):
        lasts = []
        for number, _ in enumerate(loader, 1):
            batches.advance()
            lasts.append(number == len(loader))
        assert lasts == [False] * (expected - 1) + [True]
        assert len(loader) == expected


def test_a_loop_that_was_left_has_no_length_any_more():
    batches = StatefulBatchSampler(range(10), 2)
    batches.advance(3)
    for _ in batches:
        assert len(batches) == 2
        break
    assert len(batches) == 5
    going_on = iter(batches)
    assert len(pickle.loads(pickle.dumps(batches))) == 5, "iterations are not taken along"
    assert len(list(going_on)) == 2


def test_each_epoch_has_an_order_of_its_own_that_only_the_seed_decides():
    one, same, other = (StatefulBatchSampler(range(64), 8, seed=seed) for seed in (1, 1, 2))
    first = list(one)
    assert first == list(same)
    assert first != list(other)
    one.advance(8)
    assert one.epoch == 1
    assert list(one) != first
    assert sorted(sample for batch in one for sample in batch) == list(range(64))
    assert list(StatefulBatchSampler(range(4), 2, shuffle=False)) == [[0, 1], [2, 3]]


def test_the_hook_is_called_once_and_only_within_an_epoch():
    calls = []
    batches = StatefulBatchSampler(range(8), 2)
    batches.before_first = lambda: calls.append(batches.position)
    list(batches)
    assert calls == []
    batches.before_first = lambda: calls.append(batches.position)
    batches.advance()
    list(batches)
    list(batches)
    assert calls == [2]


def test_other_data_or_another_seed_is_refused():
    state = StatefulBatchSampler(range(8), 2, seed=1).state_dict()
    with pytest.raises(ConfigError, match=r"8 samples .* seed 1; .* 9 .* seed 1"):
        StatefulBatchSampler(range(9), 2, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"seed 1; .* 8 .* seed 2"):
        StatefulBatchSampler(range(8), 2, seed=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("samples", "batch", "drop_last"), [(0, 1, False), (3, 4, True), (3, 0, False)]
)
def test_too_few_samples_are_refused(samples, batch, drop_last):
    with pytest.raises(ConfigError, match=f"{samples} samples"):
        StatefulBatchSampler(range(samples), batch, drop_last=drop_last)


@pytest.mark.parametrize("batch", [2.0, "2", True, None])
def test_batch_sizes_that_are_no_whole_numbers_are_refused(batch):
    with pytest.raises(ToolkitError, match=f"batch_size .*{batch!r} "):
        StatefulBatchSampler(range(8), batch)


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, "1", 1.0, None])
def test_seeds_that_torch_does_not_take_are_refused(seed):
    with pytest.raises(ToolkitError, match=f"seed is {seed!r} .*whole number"):
        StatefulBatchSampler(range(8), 2, seed=seed)


def test_the_largest_seed_has_a_second_epoch_and_numpys_numbers_are_numbers():
    batches = StatefulBatchSampler(range(8), np.int64(2), seed=(1 << 64) - 1)
    first = list(batches)
    batches.advance(4)
    assert sorted(map(sorted, list(batches))) != sorted(map(sorted, first))
    assert sorted(sample for batch in batches for sample in batch) == list(range(8))


def test_several_workers_need_a_process_group_first(monkeypatch):
    """Without a group, each worker would silently train on all samples."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE .* 2, .*init\(\)"):
        StatefulBatchSampler(range(8), 2)
