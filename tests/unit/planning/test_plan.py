from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import TORCHRUN, TRAIN
from distlaunch.core.model.topology import CpuInventory, Node, Topology
from distlaunch.planning.build_plan import bind
from tests.facts import mentions
from tests.unit.planning.plans import plan

# --- binding


def test_the_port_is_open_until_it_is_bound(make_facts):
    planned = plan(make_facts)
    assert (planned.master_port, planned.wanted_port, "MASTER_PORT" in planned.env) == (
        None,
        0,
        False,
    )
    assert bind(planned, attempt=0, master_port=4711).env["MASTER_PORT"] == "4711"


def test_a_port_that_is_asked_for_is_known_from_the_start(make_facts):
    planned = plan(make_facts, master_port=29500, master_addr="10.0.0.1")
    assert (planned.master_port, planned.wanted_port) == (29500, 29500)
    assert (planned.env["MASTER_PORT"], planned.env["MASTER_ADDR"]) == ("29500", "10.0.0.1")


def test_every_attempt_has_its_own_number_port_and_error_files(make_facts):
    planned = plan(make_facts)
    second = bind(bind(planned, attempt=0, master_port=1), attempt=1, master_port=2)
    assert second == bind(planned, attempt=1, master_port=2), "nothing of an earlier attempt stays"
    assert second.workers[1].env["TORCHELASTIC_ERROR_FILE"] == TRAIN.error_files("/r/job-1", 1)(1)
    for layout in (TRAIN, TORCHRUN):
        for folder in ("/r", "/r{0}%s"):
            assert layout.error_files(folder, 3)(5).startswith(layout.attempt_dir(folder, 3) + "/")
    moved = replace(planned, run_dir="/elsewhere")
    assert (
        bind(moved, attempt=0, master_port=1)
        .workers[0]
        .env["TORCHELASTIC_ERROR_FILE"]
        .startswith("/elsewhere/")
    )


def test_each_attempt_has_the_backends_files_in_its_own_folder(make_facts):
    on_gpus = Topology(nodes=(Node(host="a", slots=2),), device="cuda")
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    planned = plan(make_facts, topology=on_gpus)
    for attempt in (0, 1):
        env = bind(planned, attempt=attempt, master_port=1).env
        assert {env[name] for name in names} == {f"/r/job-1/attempt-{attempt}/nccl_trace_rank_"}


@pytest.mark.parametrize(
    "options",
    [
        {"facts": {"environ": {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}}},
        {"env": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/mine",)},
    ],
)
def test_a_file_that_has_an_old_name_and_a_new_one_is_left_alone_if_either_is_set(
    make_facts, options
):
    planned = plan(
        make_facts, topology=Topology(nodes=(Node(host="a", slots=1),), device="cuda"), **options
    )
    bound = bind(planned, attempt=0, master_port=1)
    assert "TORCH_FR_DUMP_TEMP_FILE" not in bound.env
    assert {**bound.base_env, **bound.given_env}["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/mine"
    assert "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in bound.env


# --- notes, and what is shown


def test_notes_of_the_topology_are_passed_on(make_facts):
    assert mentions(plan(make_facts, num_procs=None).notes[0], "CPU", "--num-procs")


def test_a_pinned_launcher_is_reported(make_facts):
    [note] = plan(make_facts, facts={"cpus": CpuInventory(allowed=(3,), online=64)}).notes
    assert "pinned to 1 of 64 CPUs" in note


@pytest.mark.parametrize(
    ("environ", "options", "message"),
    [
        ({"VIRTUAL_ENV": "/venv"}, {}, True),
        ({"CONDA_PREFIX": "/conda"}, {}, True),
        ({"VIRTUAL_ENV": "/usr"}, {}, False),
        ({"VIRTUAL_ENV": "/us"}, {}, True),
        ({"VIRTUAL_ENV": ""}, {}, False),
        ({"VIRTUAL_ENV": "/venv"}, {"python": "py"}, False),
        ({"VIRTUAL_ENV": "/venv"}, {"script": "py", "no_python": True}, False),
        ({}, {}, False),
    ],
)
def test_an_active_environment_that_workers_do_not_run_in_is_reported(
    make_facts, environ, options, message
):
    planned = plan(make_facts, facts={"environ": environ, "programs": {"py": "/bin/py"}}, **options)
    notes = [note for note in planned.notes if "not that of the active environment" in note]
    assert bool(notes) == message
    if message:
        assert f"--python={next(iter(environ.values()))}/bin/python" in notes[0]


# --- properties


@given(
    procs=st.integers(1, 9),
    bound=st.sampled_from(["none", "cores", "numa"]),
    environ=st.dictionaries(
        st.sampled_from(["A", "RANK", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"]), st.text(max_size=3)
    ),
    port=st.none() | st.integers(1, 65535),
)
@settings(deadline=None)
def test_the_same_facts_give_the_same_plan(make_facts, procs, bound, environ, port):
    def planned(names: list[str]) -> LaunchPlan:
        facts = {"environ": {name: environ[name] for name in names}}
        return plan(make_facts, facts=facts, num_procs=procs, bind=bound, master_port=port)

    first = planned(list(environ))
    assert first == planned(list(reversed(environ)))
    assert [int(worker.env["RANK"]) for worker in first.workers] == list(range(procs))
    assert len({worker.env["TORCHELASTIC_ERROR_FILE"] for worker in first.workers}) == procs
