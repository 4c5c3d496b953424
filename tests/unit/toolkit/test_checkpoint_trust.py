"""A foreign checkpoint executes nothing, fills no memory and changes no other file; errors name the
reason."""

from __future__ import annotations

import copy
import datetime as dt
import functools
import io
import json
import os
import pickle
import re
import shutil
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.allowed_types import (
    OLD_NAMES,
    Room,
    check_loaded,
    check_saved,
    state_names,
)
from distlaunch.toolkit.checkpoint.archive import Part as FilePart
from distlaunch.toolkit.checkpoint.archive import loaded
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint
from distlaunch.toolkit.checkpoint.reader import covers_once
from distlaunch.toolkit.checkpoint.state import random_states
from distlaunch.toolkit.checkpoint.storage import AllDamagedError, CheckpointError
from distlaunch.toolkit.checkpoint.unpickler import (
    MalformedError,
    OverBudgetError,
    RefusedClassError,
    Unpickler,
)
from tests.examples import examples
from tests.unit.toolkit.hostile import (
    Evil,
    Part,
    change_manifest,
    changed_metadata,
    loaded_bytes,
    put_entry,
    put_worker,
    resume,
    save,
    seal,
    torch_saved,
)
from tests.unit.toolkit.test_checkpoint_optimizers import torch_has_set_its_variables  # noqa: F401
from tests.unit.toolkit.test_checkpoint_structures import Extra

WAY_OUT = r"trust=True\) loads all classes: only for checkpoints that you have written yourself"


class Custom:
    """A class of a script."""


# --- nothing is executed -----------------------------------------------------------------------------------------------


def evil_metadata(folder, marker):
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    seal(folder)


def evil_in_metadata(folder, marker):
    with changed_metadata(folder) as metadata:
        metadata.storage_meta.checkpoint_id = Evil(marker)


def evil_bytes(folder, marker):
    put_entry(folder, "tied", torch_saved(Evil(marker)))


def evil_worker(folder, marker):
    put_worker(folder, {"random": random_states(), "parts": {"part": Evil(marker)}, "model": {}})


def evil_tensor(folder, marker):
    put_entry(folder, "model.weight", torch_saved(Evil(marker)))


def evil_tensor_of_old(folder, marker):
    put_entry(
        folder, "model.weight", torch_saved(Evil(marker), _use_new_zipfile_serialization=False)
    )


def evil_tensor_as_bytes(folder, marker):
    put_entry(folder, "model.weight", torch_saved(Evil(marker)), as_bytes=True)


@pytest.mark.parametrize(
    ("attack", "text"),
    [
        (evil_metadata, r"rank 0: \.metadata needs posix\.mkdir, which is not loaded"),
        (evil_in_metadata, r"rank 0: \.metadata needs posix\.mkdir, which is not loaded"),
        (evil_bytes, r"rank 0: __0_0\.distcp: tied needs posix\.mkdir, which is not loaded"),
        (evil_worker, r"rank 0: __0_0\.distcp: worker-0 needs posix\.mkdir, which is not loaded"),
        (
            evil_tensor,
            r"rank 0: __0_0\.distcp: model\.weight needs posix\.mkdir, which is not loaded",
        ),
        (
            evil_tensor_of_old,
            r"rank 0: __0_0\.distcp: model\.weight is not loaded: is no archive of torch\.save",
        ),
        (
            evil_tensor_as_bytes,
            r"rank 0: \.metadata: model\.weight is bytes there, and has to be a tensor",
        ),
    ],
)
def test_nothing_that_a_checkpoint_names_is_executed(tmp_path, attack, text):
    marker = tmp_path / "executed"
    folder = save(tmp_path / "c", model=nn.Linear(2, 1), part=Part({"a": 1}))
    attack(folder, marker)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match=text) as caught:
        resume(tmp_path / "c", model=nn.Linear(2, 1), part=Part())
    assert str(folder) in str(caught.value)
    assert not marker.exists()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, (
        "it is neither removed nor set aside"
    )


def test_the_attack_works_with_trust(tmp_path):
    """The tests above would notice it."""
    folder = save(tmp_path / "c", model=nn.Linear(2, 1), part=Part({"a": 1}))
    evil_worker(folder, tmp_path / "executed")
    resume(tmp_path / "c", model=nn.Linear(2, 1), part=Part(), trust=True)
    assert (tmp_path / "executed").exists()


def test_an_older_checkpoint_with_a_class_of_the_scripts_own_names_it_and_the_way_out(tmp_path):
    save(tmp_path / "c", model=nn.Linear(2, 1), part=Part({"where": Path("a")}), trust=True)
    with pytest.raises(CheckpointError, match=rf"worker-0 needs pathlib\.PosixPath, .*{WAY_OUT}"):
        resume(tmp_path / "c", model=nn.Linear(2, 1), part=Part())
    part = Part()
    assert resume(tmp_path / "c", model=nn.Linear(2, 1), part=part, trust=True) == 1
    assert part.state == {"where": Path("a")}


OLDER = Path(__file__).parents[2] / "data" / "checkpoints" / "sharded-step-000000001"


class Counted(nn.Linear):
    """A module with an extra state, as in the older checkpoint."""

    counts = None

    def get_extra_state(self):
        return self.counts

    def set_extra_state(self, state):
        self.counts = state


def test_a_value_that_no_save_writes_names_the_way_out(tmp_path):
    state = {"a": nested_tuple(200)}
    save(tmp_path, model=nn.Linear(2, 1), part=Part(state), trust=True)
    with pytest.raises(CheckpointError, match=rf"nested more than .* levels deep.*{WAY_OUT}"):
        resume(tmp_path, model=nn.Linear(2, 1), part=Part())
    part = Part()
    resume(tmp_path, model=nn.Linear(2, 1), part=part, trust=True)
    assert part.state == state


@pytest.mark.parametrize("trust", [False, True])
def test_a_checkpoint_of_an_older_version_with_sharded_parts_is_resumed(tmp_path, trust):
    shutil.copytree(OLDER, tmp_path / "step-000000001")
    model = nn.Sequential(nn.Linear(4, 4), Counted(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    average = Part({})
    assert resume(tmp_path, model=model, optimizer=optimizer, average=average, trust=trust) == 1
    assert {name: each.unique().tolist() for name, each in average.state["kept"].items()} == {
        name: [7.0] for name, _ in model.named_parameters()
    }
    assert average.state["made"] == (1, {2: None})
    assert model[1].counts == {1: {}, "two": [3]}
    assert optimizer.state[model[0].weight]["momentum_buffer"].unique().tolist() == [4.0]


def test_our_records_are_found_under_the_names_that_older_versions_had():
    for name in ("Elsewhere", "Whole"):
        assert f"distlaunch.toolkit.checkpoint_parts.{name}" in state_names()
        assert OLD_NAMES["distlaunch.toolkit.checkpoint_parts", name].__name__ == name


def nested_tuple(depth):
    value = ()
    for _ in range(depth):
        value = (value,)
    return value


# --- the save ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"where": [Path("a")]}, r"part\.where\.0 is of the class pathlib\.PosixPath"),
        (dt.timedelta(1), r"part is of the class datetime\.timedelta"),
        ({"a": {"b": Custom()}}, r"part\.a\.b is of the class .*Custom"),
        ({"a": (1, len)}, r"part\.a\.1 is of the class builtins\.builtin_function_or_method"),
        ({1: Custom}, r"part\.1 is of the class builtins\.type"),
        (defaultdict(lambda: 0), r"part is a defaultdict of .*lambda>"),
        ({"a": np.array([{}])}, r"part\.a is of the class numpy\.ndarray"),
        ({"a": torch.ones(2, device="meta")}, r"part\.a is a tensor that is on the meta device"),
        ({"a": torch.ones(2).to_sparse()}, r"part\.a is a tensor that is sparse_coo"),
        ({Custom(): 1}, r"part\.0 is of the class .*Custom"),
        ({torch.ones(1): 1}, r"part\.0 is of the class torch\.Tensor"),
        (
            {"a": {nested_tuple(30): 1}},
            r"part\.a\.0 is a key that is too large, nested too deeply.*",
        ),
        ({tuple(range(20_000))}, r"part\.0 is a key that is too large.*"),
        (Counter([(1, (Custom,))]), r"part\.0 is a key that .* of another class"),
        (np.dtype("f4", metadata={"a": 1}), r"part is of the class numpy\.dtype.*"),
        (np.zeros(2, np.dtype("f4", metadata={"a": 1})), r"part is of the class numpy\.ndarray"),
        ({"a": torch.Size([-1])}, r"part\.a is a torch\.Size of negative numbers"),
    ],
)
def test_a_save_refuses_what_a_resume_would_refuse_and_writes_nothing(tmp_path, state, text):
    checkpoint = Checkpoint(tmp_path, model=nn.Linear(2, 1), part=Part(state))
    with pytest.raises(CheckpointError, match=rf"{text}, .*resume\(\) .*{WAY_OUT}"):
        checkpoint.save(0)
    checkpoint.close()
    assert os.listdir(tmp_path) == [".lock"]


def test_the_first_step_refuses_what_the_first_save_would_refuse_of_a_part(tmp_path):
    checkpoint = Checkpoint(
        tmp_path, model=nn.Linear(2, 1), every=100, part=Part({"where": Path("a")})
    )
    assert checkpoint.resume() == 0
    with pytest.raises(ConfigError, match=rf"part\.where .* class .*{WAY_OUT}"):
        checkpoint.step(0)
    checkpoint.close()
    assert os.listdir(tmp_path) == [".lock"]


def test_the_first_step_takes_any_class_that_is_trusted_and_a_part_is_read_but_once(tmp_path):
    class Counting(Part):
        calls = 0

        def state_dict(self):
            self.calls += 1
            return self.state

    trusted, counting = Counting({"where": Path("a")}), Counting({"n": 1})
    first = Checkpoint(tmp_path / "a", model=nn.Linear(2, 1), every=100, trust=True, part=trusted)
    second = Checkpoint(tmp_path / "b", model=nn.Linear(2, 1), every=100, part=counting)
    for step in range(5):
        first.step(step)
        second.step(step)
    assert (trusted.calls, counting.calls) == (0, 1)
    first.close()
    second.close()


def test_an_extra_state_and_a_setting_of_an_unknown_class_are_refused_at_the_save(tmp_path):
    model = Extra(Custom())
    with pytest.raises(CheckpointError, match=r"_extra_state .* class .*Custom"):
        save(tmp_path, model=model)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["made"] = Custom()
    with pytest.raises(CheckpointError, match=r"optimizer's made .* class .*Custom"):
        save(tmp_path, model=model, optimizer=optimizer)


def test_trust_saves_and_loads_any_class(tmp_path):
    state = {"where": Path("a"), "for": dt.timedelta(1), "n": torch.ones(2)}
    save(tmp_path, model=nn.Linear(2, 1), part=Part(state), trust=True)
    part = Part()
    resume(tmp_path, model=nn.Linear(2, 1), part=part, trust=True)
    assert repr(part.state) == repr(state)


INERT = [
    {
        "a": [
            1,
            -(1 << 70),
            1 << 3000,
            True,
            None,
            1.5,
            2j,
            "ü\udc80",
            b"\x00\xff",
            b"",
            bytearray(b"x"),
            (),
        ]
    },
    {1: {(2, (3.0, "x")): frozenset({1})}, "s": {1, "a"}, None: set()},
    OrderedDict([("b", 1), ("a", [])]),
    defaultdict(dict, {"a": {"b": 1}}),
    Counter({3: 2, "x": 1}),
    deque([1, 2], maxlen=3),
    [
        torch.Size([1, 2]),
        torch.float8_e4m3fn,
        torch.device("cuda", 1),
        torch.device("cpu"),
        torch.strided,
    ],
    [np.float32(1.5), np.int64(3), np.bool_(1), np.str_("abc"), np.complex128(2j), np.dtype("f4")],
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.array(["a", "bc"]),
        np.zeros((0, 2)),
        np.array(1),
    ],
    [np.array([1, 2], dtype=">i4")],
    {
        "numpy": np.random.RandomState(3).get_state(),
        "generator": np.random.default_rng(1).bit_generator.state,
    },
    {"torch": torch.get_rng_state()},
    [np.str_(""), np.bytes_(b"")],
    {torch.strided: 1, torch.Size([2, 1 << 59]): 2, nested_tuple(18): 3, -1: 4, -2: 5},
    {np.str_("a" * 100): 1, np.int64(5): 2, 2.0**61: 3, 1: 4, 2j: 5},
]


@pytest.mark.parametrize("state", INERT)
def test_all_types_of_states_are_saved_and_loaded(tmp_path, state):
    save(tmp_path, model=nn.Linear(2, 1), part=Part(state))
    part = Part()
    resume(tmp_path, model=nn.Linear(2, 1), part=part)
    assert repr(part.state) == repr(state)
    assert type(part.state) is type(state)


TYPES = "uint8 int8 int16 int32 int64 uint16 uint32 uint64 bool float16 bfloat16 float32 float64 complex32 complex64"
TYPES += " complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in TYPES.split()])
def test_tensors_of_all_types_come_back_bit_for_bit(dtype):
    tensor = torch.arange(96, dtype=torch.uint8).view(dtype)
    check_saved(tensor, "a")
    found = loaded_bytes(torch_saved({"a": tensor, "b": tensor[1:4]}))
    assert found["a"].dtype == dtype
    assert torch.equal(found["a"].view(torch.uint8), torch.arange(96, dtype=torch.uint8))
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_tuple_that_holds_itself_comes_back(length):
    inner = []
    value = (inner, *range(length - 1))
    inner.append(value)
    check_saved(value, "a")
    found = loaded_bytes(torch_saved(value))
    assert found[0][0] is found
    assert found[1:] == value[1:]


def test_tensors_keep_strides_gradients_attributes_and_views():
    parameter = nn.Parameter(torch.ones(3), requires_grad=False)
    parameter.tensor_parallel = True
    plain = torch.arange(6.0).reshape(2, 3)
    state = [
        plain.t(),
        plain[:, 1:],
        torch.ones(2, requires_grad=True),
        parameter,
        torch.tensor(3),
        torch.ones(0, 4),
    ]
    state += [torch.tensor([1j]).conj(), torch.ones(1).expand(5)]
    for each in state:
        check_saved(each, "a")
    found = loaded_bytes(torch_saved(state))
    assert repr(found) == repr(state)
    assert [each.stride() for each in found] == [each.stride() for each in state]
    assert found[3].tensor_parallel is True
    assert type(found[3]) is nn.Parameter


def trained(scheduler=None, optimizer=torch.optim.AdamW, **options):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = optimizer(model.parameters(), lr=0.1, **options)
    parts = {} if scheduler is None else {"scheduler": scheduler(optimizer)}
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step(lambda: torch.tensor(0.0)) if isinstance(
            optimizer, torch.optim.LBFGS
        ) else optimizer.step()
    return {"model": model, "optimizer": optimizer, **parts}


class Scaling:
    """Grows or shrinks a learning rate; LambdaLR saves its attributes."""

    def __init__(self):
        self.by = 0.5

    def __call__(self, epoch):
        return self.by**epoch


schedulers = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: schedulers.StepLR(o, 2),
        lambda o: schedulers.MultiStepLR(o, [2, 2, 5]),
        lambda o: schedulers.LambdaLR(o, Scaling()),
        lambda o: schedulers.LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: schedulers.MultiplicativeLR(o, Scaling()),
        schedulers.ConstantLR,
        schedulers.LinearLR,
        lambda o: schedulers.ExponentialLR(o, 0.9),
        schedulers.PolynomialLR,
        lambda o: schedulers.CosineAnnealingLR(o, 10),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 10),
        lambda o: schedulers.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
        lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=10),
        schedulers.ReduceLROnPlateau,
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o), schedulers.StepLR(o, 2)], [3]
        ),
        lambda o: schedulers.ChainedScheduler([schedulers.LinearLR(o), schedulers.StepLR(o, 2)]),
        lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
    ],
)
def test_states_of_torchs_schedulers_are_saved_and_loaded(tmp_path, scheduler):
    save(tmp_path, **trained(scheduler))
    assert resume(tmp_path, **trained(scheduler)) == 1


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *(
            (getattr(torch.optim, name), {})
            for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax")
        ),
        *(
            (getattr(torch.optim, name), {})
            for name in ("ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
        ),
        (torch.optim.Adam, {"amsgrad": True, "betas": (np.float64(0.9), 0.99)}),
        (torch.optim.Adam, {"foreach": True, "capturable": False}),
    ],
)
def test_states_of_torchs_optimizers_are_saved_and_loaded(tmp_path, optimizer, options):
    before = trained(optimizer=optimizer, **options)
    save(tmp_path, **before)
    after = trained(optimizer=optimizer, **options)
    assert resume(tmp_path, **after) == 1
    states = [list(each["optimizer"].state.values()) for each in (before, after)]
    assert repr(states[0]) == repr(states[1])


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
types = (
    st.sampled_from(
        [np.str_(""), np.bytes_(b""), np.str_("ü"), np.float16(2), np.bool_(True), np.uint64(3)]
    )
    | st.sampled_from([torch.strided, torch.sparse_coo, torch.float16, torch.qint8])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 1)])
    | st.sampled_from([np.dtype(">i4"), np.dtype("U0"), np.dtype("f4", metadata={"a": 1})])
    | st.lists(st.integers(-1, 1 << 62), max_size=3).map(torch.Size)
)
nests = st.tuples(scalars | types, st.integers(0, 30)).map(
    lambda each: functools.reduce(lambda inner, _: (inner,), range(each[1]), each[0])
)
plain_keys = st.recursive(
    scalars | types | nests,
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner),
    max_leaves=4,
)
keys = st.deferred(lambda: plain_keys)  # its representation is short
values = st.recursive(
    keys | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.dictionaries(keys, inner).map(lambda each: defaultdict(list, each))
        | st.dictionaries(keys, st.integers()).map(Counter)
        | st.sets(keys)
        | st.lists(inner).map(deque)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=examples(150))
@given(values)
def test_every_saved_state_is_loaded(value):
    try:
        check_saved(value, "a")
    except ConfigError:
        reject()
    found = loaded_bytes(torch_saved(value))
    assert type(found) is type(value)
    assert found == value


# --- hostile pickles ---------------------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def doubled(times: int) -> bytes:
    """Return a pickle of a list of twice a list of twice a list …"""
    return b"\x80\x02]q\x00" + b"".join(b"]q\x01(h\x00h\x00eq\x00" for _ in range(times)) + b"."


def unpickled(data: bytes):
    value = Unpickler(data, state_names()).load()
    check_loaded(value, len(data))
    return value


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02\x8b\xff\xff\xff\xff.",  # LONG4
        b"\x80\x02X\xff\xff\xff\xff.",  # BINUNICODE
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",  # BINUNICODE8
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",  # BINBYTES8
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",  # BYTEARRAY8
        b"\x80\x02I" + b"9" * 100_000 + b"\n.",  # INT
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02(i__builtin__\neval\n.",  # INST
        b"\x80\x02c__builtin__\neval\n.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x0dfloat32.__doc\x93.",
        b"\x80\x02ctorch\nload\n.",
        b"\x80\x02c__builtin__\nset\n}b.",  # BUILD of a class
        b"\x80\x02c__builtin__\nset\nK\x01\x85R.",
        b"\x80\x02c__builtin__\nset\n.",
        b"\x80\x02ccollections\ndefaultdict\nc__builtin__\nset\nc__builtin__\nset\n\x86R.",
        b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R.",
        b"\x80\x02}](K\x01]us.",
        b"\x80\x02K\x01",
        b"\x80\x02.",
        b"",
        nested(1_000_000),
        b"\x80\x02}\x8b"
        + struct.pack("<I", 1 << 20)
        + b"\x01" * (1 << 20)
        + b"q\x00Ns"
        + b"h\x00Ns" * 10_000
        + b".",
        doubled(60),
        b"\x80\x02(" + b"K\x01\x85" + b"\x85" * 1_000_000 + b"K\x01d.",
        b"\x80\x02}K\x01\x85" + b"\x85" * 1_000_000 + b"K\x01s.",  # a key that is nested deeply
        b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",  # a key of doubled tuples
        b"\x80\x02c_codecs\nencode\nq\x00X\x00\x00\x10\x00"
        + b"a" * (1 << 20)
        + b"X\x06\x00\x00\x00latin1\x86q\x010(h"
        + b"h\x00h\x01R" * 10_000
        + b"l.",
    ],
)
def test_a_hostile_pickle_is_refused_at_once(data):
    with pytest.raises((RefusedClassError, MalformedError, TypeError)):
        unpickled(data)


def with_keys(keys: list[bytes]) -> bytes:
    return b"\x80\x02}(" + b"".join(key + b"N" for key in keys) + b"u."


def number(value: int) -> bytes:
    data = pickle.dumps(value, protocol=2)
    return data[2:-1]


PRIME = (1 << 61) - 1
"""Numbers that differ by it have the same hash."""


def imaginary(step: int) -> bytes:
    return pickle.dumps(complex(-1_000_003 * step, step), protocol=2)[2:-1]


@pytest.mark.parametrize(
    "keys",
    [
        [number(PRIME * step) for step in range(1, 5000)],
        [number(PRIME * step) + b"\x85" for step in range(1, 5000)],
        [imaginary(step) for step in range(1, 5000)],
        [b"ctorch\nSize\n" + number(PRIME * step) + b"\x85\x85R" for step in range(1, 4)] * 1500,
        [
            b"(" + b"".join(number(PRIME * (step >> place & 1)) for place in range(13)) + b"t"
            for step in range(5000)
        ],
    ],
)
def test_keys_of_the_same_hash_are_refused(keys):
    with pytest.raises(OverBudgetError):
        unpickled(with_keys(keys))
    with pytest.raises(OverBudgetError):
        unpickled(b"\x80\x02c__builtin__\nset\n](" + b"".join(keys) + b"e\x85R.")


def test_pairs_of_an_ordered_dict_that_are_dictionaries_are_refused():
    """Their keys are not those that are checked."""
    pairs = b"".join(b"}(" + number(PRIME * step) + b"NK\x00Nu" for step in range(1, 9))
    with pytest.raises(MalformedError, match=r"OrderedDict .* no pairs"):
        unpickled(b"\x80\x02ccollections\nOrderedDict\n](" + pairs + b"e\x85R.")


def test_a_value_of_numpys_that_is_built_often_is_refused():
    """Each time would go through all of its entries in the memo."""
    made = b"cnumpy\ndtype\nX\x02\x00\x00\x00f4\x89\x88\x87R" + b"q\x00" * 5000
    state = b"(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x010"
    unpickled(b"\x80\x02" + made + state + b"h\x00h\x01b.")
    often = b"h\x00" * 3 + b"h\x01b0" * 3
    with pytest.raises(MalformedError, match="numpy's twice"):
        unpickled(b"\x80\x02" + made + state + often + b".")


def test_many_containers_may_have_keys_of_the_same_hash():
    value = [{0.5: None, (1, 2): None, 3j: {4.5}} for _ in range(5000)]
    assert loaded_bytes(torch_saved(value)) == value


@pytest.mark.parametrize(
    "key",
    [
        b"ctorch\nSize\n(" + b"K\x01" * 5000 + b"t\x85R",
        pickle.dumps(np.str_("a" * 5000), protocol=2)[2:-1],
    ],
)
def test_a_long_key_that_is_set_often_is_refused(key):
    data = b"\x80\x02}" + key + b"r\x00\x00\x01\x00Ns" + b"j\x00\x00\x01\x00Ns" * 5000 + b"."
    with pytest.raises(OverBudgetError):
        unpickled(data)


def tuples(depth: int) -> bytes:
    return b"K\x01" + b"\x85" * depth


@pytest.mark.parametrize(
    "data",
    [
        b"c_codecs\nencode\nX\x01\x00\x00\x00a" + tuples(1_000_000) + b"\x86R.",
        b"ccollections\ndefaultdict\n" + tuples(1_000_000) + b"\x85R.",
    ],
)
def test_arguments_that_are_nested_deeply_do_not_crash_python(data):
    with pytest.raises(MalformedError):
        unpickled(b"\x80\x02" + data)


@pytest.mark.parametrize("place", [b"K\x01", b"]", tuples(3), b"N"])
@pytest.mark.parametrize("module", ["parts", "checkpoint_parts"])
def test_a_record_of_ours_whose_place_is_no_text_is_refused(place, module):
    module = b"distlaunch.toolkit.checkpoint" + {"parts": b".parts"}.get(module, b"_parts")
    data = b"\x80\x02c" + module + b"\nElsewhere\n)\x81](" + place + b"eb."
    with pytest.raises(MalformedError, match=r"place .* Elsewhere .* type"):
        unpickled(data)


def test_attributes_of_a_dictionary_that_are_set_often_are_refused():
    names = b"".join(b"X\x04\x00\x00\x00%04dN" % number for number in range(5000))
    data = b"\x80\x02}(" + names + b"uq\x00ccollections\nOrderedDict\n)R" + b"h\x00b" * 5000 + b"."
    with pytest.raises(OverBudgetError):
        unpickled(data)


def test_long_arguments_that_are_used_often_are_refused(tmp_path):
    """A path in the metadata, a type and an array of numpy: none of them keeps its arguments."""
    arguments = b"X\x02\x00\x00\x00f4" + b"N" * 5000
    often = b"".join((b"cnumpy\ndtype\nj\x00\x00\x01\x00R") for _ in range(5000))
    data = b"\x80\x02(" + arguments + b"tr\x00\x00\x01\x00](" + often + b"e."
    with pytest.raises(OverBudgetError):
        unpickled(data)
    folder = save(tmp_path, model=nn.Linear(2, 1))
    often = b"".join(b"cpathlib\nPosixPath\nj\x00\x00\x01\x00R" for _ in range(5000))
    data = b"\x80\x02(" + arguments + b"tr\x00\x00\x01\x00](" + often + b"e."
    (folder / ".metadata").write_bytes(data)
    seal(folder)
    with pytest.raises(CheckpointError, match="far more"):
        resume(tmp_path, model=nn.Linear(2, 1))


def test_copies_of_a_long_text_do_not_fill_the_memory():
    long = b"X\x00\x00\x10\x00" + b"a" * (1 << 20)
    data = (
        b"\x80\x02(c_codecs\nencode\nq\x00"
        + long
        + b"X\x06\x00\x00\x00latin1\x86q\x01R"
        + b"h\x00h\x01R" * 1000
        + b"t."
    )
    with pytest.raises(OverBudgetError):
        Unpickler(data, state_names()).load()


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(
        st.sampled_from([bytes([code]) for code in range(256)]) | st.binary(max_size=3), max_size=60
    )
)
def test_no_pickle_crashes_the_unpickler(pieces):
    try:
        Unpickler(b"\x80\x02" + b"".join(pieces) + b".", state_names()).load()
    except (
        RefusedClassError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
    ):
        pass


# --- hostile tensors ---------------------------------------------------------------------------------------------------


def rewritten(data: bytes, change) -> bytes:
    """Change the pickle in an archive of torch.save."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for each in old.infolist():
            content = old.read(each)
            new.writestr(
                each.filename, change(content) if each.filename.endswith("data.pkl") else content
            )
    return stream.getvalue()


def pickle_of(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def test_names_of_parts_are_printed_on_one_line(tmp_path, caplog):
    folder = save(tmp_path, model=nn.Linear(2, 1), part=Part({"a": 1}))
    parts = {"part": {"a": 1}, "\x1b[2J\nforged": {}}
    put_worker(folder, {"random": random_states(), "parts": parts, "model": {}})
    assert resume(tmp_path, model=nn.Linear(2, 1), part=Part()) == 1
    (message,) = [each for each in caplog.messages if "forged" in each]
    assert message.isprintable()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x07", b"J\xff\xff\xff\x7f"),  # the size
        (b"K\x07", b"\x8a\x08" + struct.pack("<q", 1 << 60)),
        (b"K\x07", b"J\xff\xff\xff\xff"),
        (b"X\x01\x00\x00\x000", b"X\x07\x00\x00\x00../../x"),
    ],
)
def test_a_tensor_larger_than_its_storage_is_refused(old, new):
    data = torch_saved(torch.ones(7))
    with pytest.raises(MalformedError):
        loaded_bytes(rewritten(data, lambda content: content.replace(old, new)))


def test_a_tensor_whose_attributes_lead_back_to_it_is_refused_at_the_save_with_its_key():
    tensor = torch.ones(2)
    tensor.owner = {"of": [tensor]}
    with pytest.raises(ConfigError, match=r"a\.owner\.of\.0 .* attributes"):
        check_saved(tensor, "a")


def test_attributes_of_a_tensor_that_repeat_are_refused():
    tensor = torch.ones(2)
    tensor.doubled = []
    for _ in range(40):
        tensor.doubled = [tensor.doubled, tensor.doubled]
    with pytest.raises(MalformedError, match="repeats values"):
        loaded_bytes(torch_saved(tensor))


def test_attributes_of_a_tensor_that_are_nested_deeply_are_refused():
    tensor = inner = torch.ones(2)
    for _ in range(60):
        inner.more = [torch.ones(1)]
        inner = inner.more[0]
    with pytest.raises(ConfigError, match="100 levels"):
        check_saved(tensor, "a")


def test_attributes_that_many_tensors_share_are_refused():
    tensor = torch.ones(1)
    vars(tensor).update({f"a{number}": None for number in range(3000)})
    construct = pickle_of(torch_saved(tensor))[2:-1]
    arguments_at = construct.rindex(b"t")  # of _rebuild_from_type_v2
    data = construct[: arguments_at + 1] + b"r\x00\x00\x01\x00" + construct[arguments_at + 1 :]
    again = b"ctorch._tensor\n_rebuild_from_type_v2\nj\x00\x00\x01\x00R"
    many = b"\x80\x02(" + data + again * 3000 + b"t."
    with pytest.raises(OverBudgetError):
        loaded_bytes(rewritten(torch_saved(tensor), lambda _: many))


@pytest.mark.parametrize("name", ["size", "numel", "detach", "__deepcopy__"])
def test_an_attribute_of_a_tensor_in_the_place_of_a_method_is_refused(name):
    tensor = torch.ones(1)
    vars(tensor)[name] = 5
    with pytest.raises(ConfigError, match=r"a .* attribute .* Tensor"):
        check_saved(tensor, "a")
    marked = torch.ones(1)
    vars(marked)["n" * len(name)] = 5
    old, new = (f"{each}".encode() for each in ("n" * len(name), name))
    data = rewritten(torch_saved(marked), lambda content: content.replace(old, new))
    with pytest.raises(MalformedError, match=f"gives a Tensor another {name}"):
        loaded_bytes(data)


def test_an_attribute_of_an_ordered_dict_in_the_place_of_a_method_is_refused():
    value = OrderedDict(a=1)
    value.itemz = 5
    data = torch_saved(value)
    assert loaded_bytes(data).itemz == 5
    with pytest.raises(MalformedError, match="gives a OrderedDict another items"):
        loaded_bytes(rewritten(data, lambda content: content.replace(b"itemz", b"items")))
    value.items = 5
    with pytest.raises(ConfigError, match=r"a .* attribute .* OrderedDict"):
        check_saved(value, "a")


def test_an_attribute_does_not_make_a_tensor_a_sharded_one():
    tensor = torch.ones(2)
    tensor.full_tensor = tensor.to_local = 1
    assert torch.equal(loaded_bytes(torch_saved(tensor)), torch.ones(2))


def test_many_tensors_that_share_their_numbers_are_refused_at_the_save_and_at_the_load():
    """The reader may copy each of them, as optimizers do."""
    tensor = torch.ones(1 << 20)
    check_saved([tensor] * 15, "a")
    assert len(loaded_bytes(torch_saved([tensor] * 15))) == 15
    with pytest.raises(ConfigError, match=r"a\.\d+ .* share"):
        check_saved([tensor] * 100, "a")
    with pytest.raises(MalformedError, match="share"):
        loaded_bytes(torch_saved([tensor] * 100))


def test_the_room_for_shared_numbers_is_one_for_all_entries():
    room = Room(16 << 20)
    data = torch_saved([torch.ones(1).expand(1 << 20)] * 3)
    loaded(FilePart(io.BytesIO(data), 0, len(data)), room)
    with pytest.raises(MalformedError, match="share"):
        loaded(FilePart(io.BytesIO(data), 0, len(data)), room)


def test_a_compressed_archive_is_refused():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N" + b"0" * 1_000_000)
    with pytest.raises(MalformedError, match="compressed"):
        loaded_bytes(stream.getvalue())


def test_an_expanded_tensor_is_refused_at_the_save_and_at_the_load():
    huge = torch.ones(1).expand(1 << 40)
    with pytest.raises(ConfigError, match="expanded"):
        check_saved(huge, "a")
    with pytest.raises(MalformedError, match="expanded"):
        loaded_bytes(torch_saved(huge))


# --- a hostile manifest and hostile metadata ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"files": {"../../x": [0, 0]}},
        {"files": {"/etc/passwd": [0, 0]}},
        {"files": {".metadata": [-1, 0]}},
        {"files": {".metadata": [1 << 80, 0]}},
        {"files": {}},
        {"files": {"__0_0.distcp": [0, 0]}},
        {"world_size": 1 << 60},
        {"world_size": "1"},
        {"optimizers": [[]]},
    ],
)
def test_a_manifest_with_other_contents_is_damaged(tmp_path, fields):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    change_manifest(folder, **fields)
    with pytest.raises(AllDamagedError):
        resume(tmp_path, model=nn.Linear(2, 1))


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -float("inf"), 1e300, "x", [], None])
def test_a_checkpoint_of_an_impossible_time_is_resumed(tmp_path, time):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    change_manifest(folder, time=time)
    assert resume(tmp_path, model=nn.Linear(2, 1)) == 1


def test_a_manifest_without_an_end_is_damaged(tmp_path):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text('{"x": ' + "[" * 1_000_000 + text[1:])
    with pytest.raises(AllDamagedError):
        resume(tmp_path, model=nn.Linear(2, 1))


def leave_the_folder(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../../x"


def leave_the_root(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "/etc/passwd"


def compress(metadata):
    for info in metadata.storage_data.values():
        info.transform_descriptors = ("stream.zstd/1",)


def end_behind(metadata):
    for info in metadata.storage_data.values():
        info.length = 1 << 60


def repeat(metadata):
    for info in metadata.storage_data.values():
        info.offset, info.length = (
            0,
            max(each.length + each.offset for each in metadata.storage_data.values()),
        )


def be_huge(metadata):
    metadata.state_dict_metadata["model.weight"].size = torch.Size([1 << 20, 1 << 20])


def have_huge_parts(metadata):
    be_huge(metadata)
    metadata.state_dict_metadata["model.weight"].chunks[0].sizes = torch.Size([1 << 20, 1 << 20])


def have_the_same_part_often(metadata):
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size = torch.Size([1, 200])
    entry.chunks = entry.chunks * 100


def have_parts_that_overlap(metadata):
    entry = metadata.state_dict_metadata["model.weight"]
    place = next(place for place in metadata.storage_data if place.fqn == "model.weight")
    more = ChunkStorageMetadata(torch.Size([0, 1]), torch.Size([1, 1]))
    entry.chunks = [*entry.chunks, more]
    metadata.storage_data[MetadataIndex("model.weight", more.offsets)] = copy.copy(
        metadata.storage_data[place]
    )
    metadata.storage_data[place].length -= 20
    metadata.storage_data[MetadataIndex("model.weight", more.offsets)].length = 20


def have_parts_that_overlap_and_leave_a_hole(metadata):
    """Two parts of two numbers each, both of which have the first one: none has the fourth."""
    entry = metadata.state_dict_metadata["model.weight"]
    place = next(place for place in metadata.storage_data if place.fqn == "model.weight")
    info = metadata.storage_data.pop(place)
    entry.size, entry.chunks = torch.Size([2, 2]), []
    for start, sizes in ((0, [2, 1]), (1, [1, 2])):
        offsets = torch.Size([0, 0] if start == 0 else [1, 0])
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(sizes)))
        half = copy.copy(info)
        half.length //= 2
        metadata.storage_data[MetadataIndex("model.weight", offsets)] = half


def be_of_a_quantized_type(metadata):
    metadata.state_dict_metadata["model.weight"].properties.dtype = torch.qint8


def have_too_short_sizes(metadata):
    metadata.state_dict_metadata["model.weight"].chunks[0].sizes = torch.Size([2])


def be_a_model_without_a_name(metadata):
    metadata.planner_data["tied"] = ("model",)


def be_an_optimizer_without_a_key(metadata):
    metadata.planner_data["tied"] = ("optimizer", "state", "weight")


def be_a_part_without_a_place(metadata):
    metadata.planner_data["tied"] = ("parts", "part")


def be_a_part_of_bytes(metadata):
    metadata.planner_data["tied"] = ("parts", "part", "('a',)")


def be_twice_in_one_place(metadata):
    metadata.planner_data["model.bias"] = metadata.planner_data["model.weight"]


def be_nobodys_optimizer(metadata):
    metadata.planner_data["tied"] = ("optimizer", "state", "weight", "step")


def lack_a_worker(metadata):
    for records in (metadata.state_dict_metadata, metadata.planner_data):
        del records["worker-0"]


def have_many_dimensions(metadata):
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size = torch.Size([1] * 1000)


def share_empty_parts(metadata):
    nowhere, empty = torch.Size([0, 0]), torch.Size([0, 2])
    entry = copy.copy(metadata.state_dict_metadata["model.weight"])
    entry.size, entry.chunks = empty, [ChunkStorageMetadata(nowhere, empty)] * 3000
    info = copy.copy(next(iter(metadata.storage_data.values())))
    info.length = 0
    for key in map(str, range(300)):
        metadata.state_dict_metadata[key] = entry
        metadata.storage_data[MetadataIndex(key, nowhere)] = info


def have_a_long_path(metadata):
    metadata.planner_data["tied"] = (0,) * 1000


def have_a_path_of_huge_numbers(metadata):
    metadata.planner_data["tied"] = (1 << 100_000,) * 50


def transform_by_deep_tuples(metadata):
    deep = ()
    for _ in range(400):
        deep = (deep,)
    for info in metadata.storage_data.values():
        info.transform_descriptors = deep


def have_no_parts(metadata):
    metadata.state_dict_metadata["model.weight"].chunks = []


def be_far(metadata):
    metadata.planner_data["tied"] = ("optimizer", "param_groups", 1 << 40)


def be_before(metadata):
    metadata.planner_data["tied"] = ("optimizer", "param_groups", -1)


def be_nowhere(metadata):
    metadata.storage_data = {
        key: value for key, value in metadata.storage_data.items() if key.fqn != "tied"
    }


def be_a_class(metadata):
    metadata.storage_meta.save_id = Custom


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (leave_the_folder, r"it names the file '\.\./\.\./x', which is none of this checkpoint"),
        (leave_the_root, r"it names the file '/etc/passwd'"),
        (compress, "transform_descriptors of a _StorageInfo is a tuple"),
        (end_behind, "behind the end of __0_0.distcp"),
        (repeat, "more entries than fit into the files"),
        (be_huge, "it has model.weight larger than its parts"),
        (have_huge_parts, "it has a part of model.weight that is in no file"),
        (have_no_parts, "it has model.weight larger than its parts"),
        (have_the_same_part_often, "it has the same part of model.weight twice"),
        (have_parts_that_overlap, "it has parts of model.weight that overlap"),
        (have_parts_that_overlap_and_leave_a_hole, "it has parts of model.weight that overlap"),
        (be_of_a_quantized_type, r"it has model.weight of the type torch\.qint8"),
        (have_too_short_sizes, "it has a part of model.weight outside of it"),
        (be_a_model_without_a_name, "it has tied in a place that no training has"),
        (be_an_optimizer_without_a_key, "it has tied in a place that no training has"),
        (be_a_part_without_a_place, "it has tied in a place that no training has"),
        (be_a_part_of_bytes, "it has tied in a place that no training has"),
        (be_twice_in_one_place, r"it has two entries in the place of model\.(weight|bias)"),
        (be_nobodys_optimizer, "has an optimizer without parameter groups"),
        (lack_a_worker, "has no entry worker-0"),
        (have_many_dimensions, "it has model.weight with more than 64 dimensions"),
        (share_empty_parts, "it repeats parts of tensors"),
        (have_a_long_path, "it has 'tied' in no place"),
        (have_a_path_of_huge_numbers, "lists that are longer than there are entries"),
        (transform_by_deep_tuples, "transform_descriptors of a _StorageInfo is a tuple"),
        (be_far, "lists that are longer than there are entries"),
        (be_before, "it has tied in no place"),
        (be_nowhere, "it does not tell where tied is"),
        (be_a_class, r"\.metadata needs .*Custom"),
    ],
)
def test_metadata_that_the_files_do_not_bear_out_is_refused(tmp_path, change, text):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    with changed_metadata(folder) as metadata:
        change(metadata)
    with pytest.raises(CheckpointError, match=text) as caught:
        resume(tmp_path, model=nn.Linear(2, 1))
    assert re.search(r"step-000000001: rank 0: \.metadata ", str(caught.value))


parts_of_a_grid = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=2, max_size=2),
        st.lists(st.integers(1, 3), min_size=2, max_size=2),
    ).map(lambda part: (part[0], [min(n, 3 - at) for at, n in zip(*part, strict=True)])),
    max_size=5,
)


@settings(deadline=None, max_examples=300)
@given(parts_of_a_grid, st.booleans())
def test_parts_cover_a_tensor_if_each_number_is_in_one_of_them(parts, is_tiled):
    if is_tiled:
        parts = [([0, 0], [2, 1]), ([0, 1], [1, 2]), ([1, 2], [2, 1]), ([2, 0], [1, 2])]
        parts = [*parts, ([1, 1], [1, 1])]  # a pinwheel: no straight cut divides it
    counts = torch.zeros(3, 3, dtype=torch.int64)
    for (row, column), (rows, columns) in parts:
        counts[row : row + rows, column : column + columns] += 1
    assert covers_once([3, 3], parts, 1000) == bool((counts == 1).all())
    assert not is_tiled or bool((counts == 1).all())


def test_text_of_a_checkpoint_is_printed_without_control_characters(tmp_path):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    with changed_metadata(folder) as metadata:
        for info in metadata.storage_data.values():
            info.relative_path = "\x1b[2J" + "x" * 10_000
        metadata.state_dict_metadata["\x1b[2J"] = Metadata
    with pytest.raises(CheckpointError) as caught:
        resume(tmp_path, model=nn.Linear(2, 1))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_tensor_that_is_not_what_the_metadata_describes_is_refused(tmp_path):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    put_entry(folder, "model.weight", torch_saved(torch.ones(1, 2, dtype=torch.complex64)))
    with pytest.raises(CheckpointError, match=r"model\.weight .* tensor .* \.metadata"):
        resume(tmp_path, model=nn.Linear(2, 1))


def test_bytes_that_are_a_tensor_are_refused(tmp_path):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    put_entry(folder, "tied", torch_saved(torch.ones(2)))
    with pytest.raises(CheckpointError, match=r"tied .* tensor, .* bytes"):
        resume(tmp_path, model=nn.Linear(2, 1))


def test_a_tensor_in_the_place_of_bytes_is_refused(tmp_path):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    with changed_metadata(folder) as metadata:
        metadata.state_dict_metadata["tied"] = metadata.state_dict_metadata["model.bias"]
        index = next(index for index in metadata.storage_data if index.fqn == "model.bias")
        metadata.storage_data[MetadataIndex("tied", index.offset)] = metadata.storage_data[
            MetadataIndex("tied")
        ]
    with pytest.raises(CheckpointError, match=r"\.metadata: tied .* tensor .* bytes"):
        resume(tmp_path, model=nn.Linear(2, 1))


def test_a_symbolic_link_in_a_checkpoint_is_damage(tmp_path):
    folder = save(tmp_path / "c", model=nn.Linear(2, 1))
    os.rename(folder / "__0_0.distcp", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: .* symbolic link"):
        resume(tmp_path / "c", model=nn.Linear(2, 1))


def test_a_checkpoint_that_is_a_link_is_read_where_it_leads(tmp_path):
    folder = save(tmp_path / "c", model=nn.Linear(2, 1))
    os.rename(folder, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder)
    assert resume(tmp_path / "c", model=nn.Linear(2, 1)) == 1
    assert folder.is_symlink()
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


@pytest.mark.parametrize(("position", "more"), [(1 << 30, 0), (700, 100), (-1, 0)])
def test_a_random_state_that_numpy_would_read_behind_its_end_is_refused(tmp_path, position, more):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    state = np.random.RandomState(3).get_state()
    numbers = np.append(state[1], np.zeros(more, np.uint32))
    states = {**random_states(), "numpy": (state[0], numbers, position, *state[3:])}
    put_worker(folder, {"random": states, "parts": {}, "model": {}})
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: worker-0 .* numpy's"):
        resume(tmp_path, model=nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (5, "not what a worker has for itself"),
        ({}, "not what a worker has for itself"),
        ({"random": None}, "not what a worker has for itself"),
        ({"parts": {1: 2}}, "not what a worker has for itself"),
        ({"model": []}, "not what a worker has for itself"),
        ({"random": {}}, "a random state of Python's"),
        ({"random": {**random_states(), "torch": 5}}, "a random state of torch's"),
    ],
)
def test_a_worker_s_entry_that_no_worker_writes_is_refused(tmp_path, own, text):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    if own:
        own = {"random": random_states(), "parts": {}, **own} if isinstance(own, dict) else own
    put_worker(folder, own)
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp: worker-0 .*{text}") as caught:
        resume(tmp_path, model=nn.Linear(2, 1))
    assert "Move the directory away" in str(caught.value)
    assert "trust=True" not in str(caught.value), "it would not help"


@pytest.mark.parametrize(
    "model", [{"other": 1}, {"weight": torch.ones(7)}, {"weight": [1.0, 2.0]}, {"bias": None}]
)
def test_a_worker_s_own_entries_that_the_model_has_not_are_refused(tmp_path, model):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    put_worker(folder, {"random": random_states(), "parts": {}, "model": model})
    here = nn.Linear(2, 1)
    before = here.weight.tolist()
    with pytest.raises(ConfigError, match=rf"another model: .*{next(iter(model))} of rank 0 is"):
        resume(tmp_path, model=here)
    assert here.weight.tolist() == before


@pytest.mark.parametrize("key", ["tied", "classes", "optimizer.param_groups.0.params"])
@pytest.mark.parametrize("value", [5, "ab", [1], [[1]], {"a": "b"}, np.arange(3)])
def test_names_that_are_none_are_refused(tmp_path, key, value):
    def made():
        model = nn.Linear(2, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    folder = save(tmp_path, **made())
    put_entry(folder, key, torch_saved(value))
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp: {key} .* no names"):
        resume(tmp_path, **made())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("fused", [True, [1]])
def test_a_state_behind_whose_end_a_fused_optimizer_would_write_is_refused(
    tmp_path, optimizer, fused
):
    """A setting of the checkpoint may say whether it is fused."""

    def made():
        options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        return trained(optimizer=optimizer, **options)

    folder = save(tmp_path, **made())
    key = {"SGD": "momentum_buffer", "AdamW": "exp_avg", "Adagrad": "sum"}[optimizer.__name__]
    put_entry(folder, f"optimizer.state.0.weight.{key}", torch_saved(torch.ones(1, 1)))
    put_entry(folder, "optimizer.param_groups.0.fused", torch_saved(fused))
    with changed_metadata(folder) as metadata:
        entry = metadata.state_dict_metadata[f"optimizer.state.0.weight.{key}"]
        entry.size = entry.chunks[0].sizes = torch.Size([1, 1])
    here = made()
    before = copy.deepcopy(here["model"].state_dict())
    text = rf"optimizer: .*0\.weight\.{key} is \[1, 1\], and its parameter is \[2, 3\]"
    with pytest.raises(ConfigError, match=text):
        resume(tmp_path, **here)
    assert repr(here["model"].state_dict()) == repr(before)


def test_the_manifest_may_have_fields_that_are_not_known(tmp_path):
    folder = save(tmp_path, model=nn.Linear(2, 1))
    change_manifest(folder, later=json.loads("[1]"))
    assert resume(tmp_path, model=nn.Linear(2, 1)) == 1
