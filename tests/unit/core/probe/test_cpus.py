from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.model.topology import CpuInventory
from distlaunch.core.probe.cpus import count_oom_kills, probe_cpus
from distlaunch.core.probe.files import parse_cpu_list

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1_CPU = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
V1_MEMORY = "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.fixture
def machine(tmp_path):
    class Machine:
        root = str(tmp_path)

        def write(self, path: str, text: str) -> None:
            target = Path(self.root) / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

        def cgroup(self, own: str, mounts: str) -> None:
            self.write("/proc/self/cgroup", own)
            self.write("/proc/self/mountinfo", "21 1 0:1 / / rw - ext4 /dev/vda rw\n" + mounts)

        def probe(self, affinity=(0, 1, 2, 3)) -> CpuInventory:
            return probe_cpus(self.root, affinity=affinity)

    return Machine()


def test_machine_without_limits_has_no_quota(machine):
    machine.write("/sys/devices/system/cpu/online", "0-7\n")
    machine.cgroup("0::/user.slice\n", V2_MOUNT)
    machine.write("/sys/fs/cgroup/user.slice/cpu.max", "max 100000\n")
    cpus = machine.probe()
    assert (cpus.allowed, cpus.online, cpus.quota, cpus.cpuset) == ((0, 1, 2, 3), 8, None, None)


def test_tightest_quota_on_the_way_to_the_root_wins(machine):
    machine.cgroup("0::/pods/pod1/worker\n", V2_MOUNT)
    machine.write("/sys/fs/cgroup/pods/pod1/worker/cpu.max", "400000 100000\n")
    machine.write("/sys/fs/cgroup/pods/pod1/cpu.max", "150000 100000\n")
    machine.write("/sys/fs/cgroup/pods/cpu.max", "800000 100000\n")
    assert machine.probe().quota == 1.5


def test_version_one_quota_is_found_under_its_joint_controller(machine):
    machine.cgroup("4:cpu,cpuacct:/batch\n0::/\n", V1_CPU.format(top="/"))
    machine.write("/sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_quota_us", "250000\n")
    machine.write("/sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_period_us", "100000\n")
    machine.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    machine.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert machine.probe().quota == 2.5


def test_container_that_sees_the_hosts_path_finds_its_mounted_part(machine):
    machine.cgroup("4:cpu,cpuacct:/docker/abc/job\n", V1_CPU.format(top="/docker/abc"))
    machine.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n")
    machine.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    machine.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n")
    machine.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert machine.probe().quota == 0.5


def test_path_outside_the_own_namespace_falls_back_to_the_mount(machine):
    machine.cgroup("0::/../other\n", V2_MOUNT)
    machine.write("/sys/fs/cgroup/cpu.max", "300000 100000\n")
    machine.write("/sys/fs/cgroup/other/cpu.max", "100000 100000\n")
    assert machine.probe().quota == 3.0


def test_cpuset_of_the_cgroup_is_counted(machine):
    machine.cgroup("0::/job\n", V2_MOUNT)
    machine.write("/sys/fs/cgroup/cpuset.cpus.effective", "0-63\n")
    machine.write("/sys/fs/cgroup/job/cpuset.cpus.effective", "0-3,8\n")
    assert machine.probe().cpuset == 5


def test_numa_nodes_are_indexed_by_number_even_with_gaps(machine):
    machine.write("/sys/devices/system/node/node0/cpulist", "0-1\n")
    machine.write("/sys/devices/system/node/node8/cpulist", "2-3\n")
    machine.write("/sys/devices/system/node/node1/cpulist", "\n")
    machine.write("/sys/devices/system/node/possible", "0-8\n")
    numa = machine.probe().numa
    assert len(numa) == 9
    assert (numa[0], numa[1], numa[8]) == ((0, 1), (), (2, 3))


def test_siblings_group_hyperthreads_and_unknown_cpus_stand_alone(machine):
    for cpu, group in {0: "0,2", 2: "0,2", 1: "1,3"}.items():
        machine.write(
            f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", group + "\n"
        )
    assert machine.probe(affinity=(0, 1, 2, 4)).siblings == ((0, 2), (1, 3), (4,))


def test_topology_is_read_only_on_request(machine):
    machine.write("/sys/devices/system/node/node0/cpulist", "0-1\n")
    cpus = probe_cpus(machine.root, affinity=(0,), topology=False)
    assert (cpus.numa, cpus.siblings) == ((), ())


def test_without_other_information_the_affinity_counts(machine):
    assert machine.probe(affinity=(3, 1)) == CpuInventory(
        allowed=(1, 3), online=2, siblings=((1,), (3,))
    )


def test_real_machine_agrees_with_the_kernel():
    cpus = probe_cpus()
    assert set(cpus.allowed) == os.sched_getaffinity(0)
    assert cpus.online >= len(cpus.allowed)
    assert set(cpus.allowed) <= {cpu for group in cpus.siblings for cpu in group}


def test_oom_kills_come_from_the_own_version_two_cgroup(machine):
    machine.cgroup("0::/job\n", V2_MOUNT)
    machine.write(
        "/sys/fs/cgroup/job/memory.events", "low 0\noom 9\noom_kill 2\noom_group_kill 7\n"
    )
    machine.write("/proc/vmstat", "oom_kill 40\n")
    assert count_oom_kills(machine.root) == 2


def test_oom_kills_of_a_cgroup_without_memory_accounting_are_its_parents(machine):
    machine.cgroup("0::/job/step\n", V2_MOUNT)
    machine.write("/sys/fs/cgroup/job/memory.events", "oom_kill 3\n")
    assert count_oom_kills(machine.root) == 3


def test_oom_kills_come_from_version_one(machine):
    machine.cgroup("4:memory:/job\n0::/\n", V1_MEMORY)
    machine.write(
        "/sys/fs/cgroup/memory/job/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
    )
    assert count_oom_kills(machine.root) == 5


def test_oom_kills_of_the_machine_count_where_no_cgroup_does(machine):
    machine.write("/proc/vmstat", "nr_free_pages 1\noom_kill 4\n")
    assert count_oom_kills(machine.root) == 4


def test_oom_kills_are_unknown_if_the_kernel_does_not_report_them(machine):
    assert count_oom_kills(machine.root) is None


@given(st.sets(st.integers(0, 300)))
def test_cpu_list_is_read_back_as_the_kernel_writes_it(cpus):
    parts: list[str] = []
    for cpu in sorted(cpus):
        if cpu - 1 not in cpus:
            last = cpu
            while last + 1 in cpus:
                last += 1
            parts.append(str(cpu) if last == cpu else f"{cpu}-{last}")
    assert parse_cpu_list(",".join(parts) + "\n") == tuple(sorted(cpus))
