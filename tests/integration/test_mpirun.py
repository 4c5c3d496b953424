"""The environment that Open MPI's mpirun gives its processes, on one host and on several. Needs
Debian's ``openmpi-bin``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.planning.clusters.select import select

AGENT = """#!/bin/sh
# Stands in for ssh: drops options and the host, and runs the command here.
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec /bin/sh -c "$*"
"""
SHOW = "import json, os; open(os.environ['OMPI_COMM_WORLD_RANK'], 'w').write(json.dumps(dict(os.environ)))"
TRIES = 4
TWO_HOSTS = ["--host", "h1:2,h2:2"]


@pytest.fixture
def mpirun(tmp_path):
    """Return the environment of each process, by rank."""
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TMPDIR": "/tmp",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_plm_rsh_agent": str(agent),
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
    }

    def run(*options):
        for attempt in range(TRIES):
            folder = tmp_path / f"processes-{attempt}"
            folder.mkdir()
            argv = [
                "mpirun.openmpi",
                "--wdir",
                str(folder),
                *options,
                sys.executable,
                "-I",
                "-S",
                "-c",
                SHOW,
            ]
            # mpirun 4.1 now and then misses the end of processes that live so shortly, and waits
            # for ever.
            if _runs_to_its_end(argv, environ, within_s=20 if attempt < TRIES - 1 else 40):
                break
        else:
            pytest.fail("mpirun came to no end in any try")
        return [
            json.loads(path.read_text())
            for path in sorted(folder.iterdir(), key=lambda path: int(path.name))
        ]

    return run


def _runs_to_its_end(argv, environ, *, within_s: float) -> bool:
    mpirun = subprocess.Popen(
        argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        assert mpirun.wait(within_s) == 0
    except subprocess.TimeoutExpired:
        mpirun.terminate()  # it ends its daemons, too
        mpirun.wait(20)
        return False
    return True


def places(environs):
    found = [select(environ, {})[0] for environ in environs]
    assert {each.source for each in found} == {"openmpi"}
    return [
        (each.part, each.node_rank, each.local_rank, [host.slots for host in each.hosts])
        for each in found
    ]


def test_processes_of_one_host(mpirun):
    assert places(mpirun("-n", "2")) == [("worker", 0, 0, [2]), ("worker", 0, 1, [2])]


def test_processes_of_two_hosts(mpirun):
    two = [2, 2]
    expected = [
        ("worker", 0, 0, two),
        ("worker", 0, 1, two),
        ("worker", 1, 0, two),
        ("worker", 1, 1, two),
    ]
    assert places(mpirun(*TWO_HOSTS, "-n", "4")) == expected


def test_one_process_on_each_host(mpirun):
    assert places(mpirun(*TWO_HOSTS, "-N", "1")) == [
        ("node", 0, None, [None] * 2),
        ("node", 1, None, [None] * 2),
    ]


def test_uneven_hosts_are_refused(mpirun):
    environs = mpirun(*TWO_HOSTS, "-n", "3")
    assert len(environs) == 3
    for environ in environs:
        with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_"):
            select(environ, {})
