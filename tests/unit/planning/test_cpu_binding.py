from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.model.topology import CpuInventory
from distlaunch.planning.cpu_binding import bind_cpus, pinned_note, threads_per_worker
from tests.facts import mentions


def machine(
    cores: int, *, threads: int = 1, nodes: int = 1, allowed: set[int] | None = None, **more
) -> CpuInventory:
    """Build a machine as Linux numbers it: first thread of every core, then the second; nodes in
    blocks."""
    total = cores * threads
    siblings = tuple(
        tuple(core + cores * thread for thread in range(threads)) for core in range(cores)
    )
    size = cores // nodes
    numa = tuple(
        tuple(
            sorted(cpu for core in range(node * size, (node + 1) * size) for cpu in siblings[core])
        )
        for node in range(nodes)
    )
    cpus = tuple(sorted(range(total) if allowed is None else allowed))
    return CpuInventory(allowed=cpus, online=total, numa=numa, siblings=siblings, **more)


def test_unbound_workers_keep_the_launchers_cpus():
    assert bind_cpus(machine(4), 3, mode="none") == (None, None, None)


def test_cores_are_split_evenly_and_contiguously():
    assert bind_cpus(machine(8), 3, mode="cores") == ((0, 1), (2, 3, 4), (5, 6, 7))


def test_hyperthreads_of_a_core_stay_together():
    assert bind_cpus(machine(4, threads=2), 2, mode="cores") == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_cores_are_split_into_threads_when_there_are_more_workers():
    assert bind_cpus(machine(2, threads=2), 3, mode="cores") == ((0,), (2,), (1, 3))


def test_more_workers_than_cpus_share_in_turn():
    assert bind_cpus(machine(2), 5, mode="cores") == ((0,), (1,), (0,), (1,), (0,))


def test_cpus_outside_the_affinity_are_never_used():
    assert bind_cpus(machine(8, allowed={2, 3, 7}), 3, mode="cores") == ((2,), (3,), (7,))


def test_workers_sit_near_their_gpu():
    shares = bind_cpus(machine(8, nodes=2), 4, mode="cores", gpu_numa=(1, 1, 0, 0))
    assert shares == ((4, 5), (6, 7), (0, 1), (2, 3))


def test_workers_without_a_known_gpu_fill_the_idle_node():
    shares = bind_cpus(machine(8, nodes=2), 4, mode="cores", gpu_numa=(1, None, 1, None))
    assert shares == ((4, 5), (0, 1), (6, 7), (2, 3))


def test_node_with_too_few_cores_sends_workers_to_idle_ones():
    cpus = machine(8, nodes=2, allowed={0, 4, 5, 6, 7})
    shares = bind_cpus(cpus, 3, mode="cores", gpu_numa=(0, 0, 0))
    assert shares == ((0,), (4, 5), (6, 7))


def test_gpu_on_a_node_without_allowed_cpus_binds_to_what_is_allowed():
    shares = bind_cpus(machine(8, nodes=2, allowed={0, 1}), 2, mode="cores", gpu_numa=(1, 1))
    assert shares == ((0,), (1,))


def test_numa_gives_all_allowed_cpus_of_the_gpus_node():
    cpus = machine(8, nodes=2, allowed={0, 1, 2, 4, 5})
    assert bind_cpus(cpus, 3, mode="numa", gpu_numa=(1, 0, 1)) == ((4, 5), (0, 1, 2), (4, 5))


def test_numa_without_gpus_spreads_workers_over_the_nodes():
    assert bind_cpus(machine(4, nodes=2), 4, mode="numa") == ((0, 1), (0, 1), (2, 3), (2, 3))


def test_numa_on_a_machine_without_known_nodes_is_the_whole_machine():
    cpus = CpuInventory(allowed=(0, 1, 2), online=3)
    assert bind_cpus(cpus, 2, mode="numa") == ((0, 1, 2), (0, 1, 2))


def test_interleaved_nodes_are_split_by_node_not_by_number():
    cpus = CpuInventory(allowed=(0, 1, 2, 3), online=4, numa=((0, 2), (1, 3)))
    assert bind_cpus(cpus, 2, mode="cores") == ((0, 2), (1, 3))


@st.composite
def machines(draw: st.DrawFn) -> CpuInventory:
    nodes, threads = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    cores = nodes * draw(st.integers(1, 6))
    allowed = draw(st.sets(st.integers(0, cores * threads - 1), min_size=1))
    cpus = machine(cores, threads=threads, nodes=nodes, allowed=allowed)
    if draw(st.booleans()):
        return cpus
    return CpuInventory(
        allowed=cpus.allowed, online=cpus.online, numa=cpus.numa if draw(st.booleans()) else ()
    )


GPU_NUMA = st.lists(st.none() | st.integers(0, 5), max_size=12)


@given(machines(), st.integers(1, 40), GPU_NUMA, st.sampled_from(["cores", "numa"]))
def test_every_share_is_there_and_allowed(cpus, workers, gpu_numa, mode):
    shares = bind_cpus(cpus, workers, mode=mode, gpu_numa=gpu_numa)
    assert len(shares) == workers
    for share in shares:
        assert share
        assert set(share) <= set(cpus.allowed)
        assert list(share) == sorted(set(share))


def allowed_cores(cpus: CpuInventory) -> list[set[int]]:
    groups = [
        set(group) & set(cpus.allowed)
        for group in cpus.siblings or ((cpu,) for cpu in cpus.allowed)
    ]
    return [group for group in groups if group]


@given(machines(), st.integers(1, 40), GPU_NUMA)
def test_cores_are_whole_and_nobody_shares_while_there_are_enough(cpus, workers, gpu_numa):
    cores = allowed_cores(cpus)
    shares = bind_cpus(cpus, min(workers, len(cores)), mode="cores", gpu_numa=gpu_numa)
    taken = [cpu for share in shares for cpu in share or ()]
    assert len(taken) == len(set(taken))
    for core in cores:
        assert sum(1 for share in shares if core & set(share or ())) <= 1


@given(machines(), st.integers(1, 40))
def test_without_gpus_all_cores_are_used_and_shares_differ_by_one_core_at_most(cpus, workers):
    cores = allowed_cores(cpus)
    shares = bind_cpus(cpus, min(workers, len(cores)), mode="cores")
    assert {cpu for share in shares for cpu in share or ()} == set(cpus.allowed)
    sizes = [sum(1 for core in cores if core <= set(share or ())) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("workers", "more", "expected"),
    [
        (4, {}, 4),
        (3, {}, 5),
        (32, {}, 1),
        (2, {"quota": 6.0}, 3),
        (2, {"quota": 0.5}, 1),
        (2, {"quota": 64.0}, 8),
    ],
)
def test_threads_are_the_share_of_what_may_run(workers, more, expected):
    assert threads_per_worker(machine(16, **more), workers, bound=None, granted=None) == expected


def test_schedulers_grant_limits_threads():
    assert threads_per_worker(machine(16), 2, bound=None, granted=8) == 4


def test_bound_worker_has_no_more_threads_than_cpus():
    assert threads_per_worker(machine(16), 2, bound=(0, 1, 2), granted=None) == 3
    assert threads_per_worker(machine(16, quota=4.0), 2, bound=(0, 1, 2), granted=None) == 2


@given(machines(), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_threads_are_at_least_one_and_never_more_than_allowed(cpus, workers, granted):
    threads = threads_per_worker(cpus, workers, bound=None, granted=granted)
    assert 1 <= threads <= len(cpus.allowed)
    assert threads == 1 or threads * workers <= min(len(cpus.allowed), granted or len(cpus.allowed))


def test_launcher_pinned_to_one_cpu_is_reported():
    note = pinned_note(machine(64, allowed={5}))
    assert mentions(note, "pinned", "1 of 64", "CPUs")


def test_half_of_the_machine_is_no_accident():
    assert pinned_note(machine(8, allowed={0, 1, 2, 3})) is None
    assert pinned_note(machine(2, allowed={0})) is None
    assert pinned_note(machine(1)) is None


def test_cpuset_of_a_container_is_a_grant_and_not_a_pin():
    assert pinned_note(machine(64, allowed={0, 1}, cpuset=2)) is None
    assert pinned_note(machine(64, allowed={0}, cpuset=16)) is not None
