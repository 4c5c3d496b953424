"""Orders of the spawner to the warm server at critical moments. A driver plays the agent."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What each test adds speaks with a real spawner. ``worker.py`` signs ``ran-<rank>`` and ends with
# ``END``.
DRIVER = """
import os, select, signal, sys, time
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.agent.workers import process_tree as tree
from distlaunch.core.agent.workers.spawner import start_spawner
from distlaunch.core.agent.workers.streams import bootstrap_environment
from distlaunch.core.protocol import agent_messages as m, spawner_messages as w

SCRIPT = '''
import os, sys, time
open(f"ran-{os.environ['RANK']}-{os.getpid()}", "w").close()
if os.environ.get("WAITS"):
    time.sleep(60)
sys.exit(int(os.environ.get("END", "0")))
'''
open("worker.py", "w").write(SCRIPT)
argv = (sys.executable, "worker.py")
channel, watcher = start_spawner(job_id="j", orphan_grace_s=1)
while not (children := tree.children_of(watcher)):
    time.sleep(0.005)
[spawner] = children
start = m.Start(attempt=0, argv=argv, env={}, cwd=os.getcwd(), workers=(), uses_gpus=False, signal_group=False,
    terminal=False, rows=0, columns=0, stdin_rank=None, preload=("json",), bootstrap="direct")
common = {**os.environ, "DISTLAUNCH_COOKIE": "c", **bootstrap_environment(start, 256)}
common["PYTHONPATH"] += ":" + os.getcwd()
heard = []

def hear(kind, count=1, **wanted):
    end = time.monotonic() + 30
    while True:
        found = [x for x in heard if isinstance(x, kind) and all(getattr(x, k) == v for k, v in wanted.items())]
        if len(found) >= count:
            return found[count - 1]
        assert time.monotonic() < end, (kind, wanted, heard)
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN | (select.POLLOUT if channel.has_unsent else 0))
        poll.poll(1000)
        channel.flush()
        heard.extend(channel.receive() or [])

def setup(**env):
    channel.send(w.Setup(env={**common, **env}, cwd=os.getcwd(), cookie="c", nofile=256, signal_group=False))

def preload(*modules, **env):
    output = os.memfd_create("said")
    channel.send(w.Preload(modules=modules, argv=argv, env=env, bound_s=None), (output,))

def spawn(rank, argv=argv, cpus=None, **env):
    null = os.open(os.devnull, os.O_RDWR)
    error = os.open("errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    env = {"RANK": str(rank), **env}
    order = w.Spawn(rank=rank, descriptors=(0, 1, 2), argv=argv, env=env, cpus=cpus, terminal=False)
    channel.send(order, (null, os.dup(null), error))

def signal_to(*ranks, signum=signal.SIGTERM, scope=w.SCOPE_PROCESS, caught_only=False):
    channel.send(w.Signal(ranks=ranks, signum=signum, scope=scope, caught_only=caught_only))

def ran(rank):
    return len([name for name in os.listdir() if name.startswith(f"ran-{rank}-")])

def server():
    while True:
        for pid in tree.children_of(spawner):
            if open(f"/proc/{pid}/comm").read() == "dl-warm\\n":
                return pid
        time.sleep(0.005)

def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)

def sweep():
    channel.send(w.Sweep())
    assert hear(w.Swept, sum(isinstance(x, w.Swept) for x in heard) + 1).left == ()

def dismiss():
    channel.send(w.ExitSpawner())
    until(lambda: channel.receive() is None)
    os.waitpid(watcher, 0)
    assert tree.children_of(os.getpid()) == []

open("slow.py", "w").write("import os, time\\nwhile not os.path.exists('go'): time.sleep(0.005)\\n")
"""

CASES = {
    "orders_wait_until_the_modules_are_imported": """
setup(); preload("slow"); spawn(0); spawn(1)
server()
assert not ran(0)
open("go", "w").close()
for rank in (0, 1):
    hear(w.Spawned, rank=rank)
    hear(WorkerExit, rank=rank, returncode=0)
    assert ran(rank) == 1
assert isinstance(next(x for x in heard if not isinstance(x, w.Running)), w.Preloaded)
sweep(); dismiss()
""",
    "an_order_that_waits_is_called_off_by_a_signal_and_never_runs": """
setup(); preload("slow"); spawn(0); spawn(1)
server()
signal_to(0, signum=signal.SIGINT)
assert hear(WorkerExit, rank=0).returncode == -signal.SIGINT
signal_to(1, signum=signal.SIGUSR1, caught_only=True)
signal_to(1, signum=signal.SIGCONT)
open("go", "w").close()
hear(WorkerExit, rank=1, returncode=0)
assert (ran(0), ran(1)) == (0, 1)
sweep(); dismiss()
""",
    "orders_on_their_way_are_called_off_and_swept": """
setup(); preload("json"); hear(w.Preloaded)
pid = server()
os.kill(pid, signal.SIGSTOP)
for rank in range(6):
    spawn(rank)
signal_to(*range(6), signum=signal.SIGKILL, scope=w.SCOPE_TREE)
for rank in range(6):
    hear(WorkerExit, rank=rank, returncode=-9)
sweep()
assert [ran(rank) for rank in range(6)] == [0] * 6
assert tree.children_of(spawner) == [server()]
assert pid == server()
spawn(7)
hear(WorkerExit, rank=7, returncode=0)
assert ran(7) == 1
dismiss()
""",
    "a_server_that_dies_with_orders_on_their_way_leaves_each_to_run_once": """
setup(); preload("json"); hear(w.Preloaded)
os.kill(server(), signal.SIGSTOP)
for rank in range(6):
    spawn(rank)
os.kill(server(), signal.SIGKILL)
hear(w.PreloadFailed)
for rank in range(6):
    hear(WorkerExit, rank=rank, returncode=0)
assert [ran(rank) for rank in range(6)] == [1] * 6
assert sum(isinstance(x, w.PreloadFailed) for x in heard) == 1
sweep(); dismiss()
""",
    "a_server_killed_at_any_moment_while_it_forks_leaves_each_to_run_once": """
for number in range(12):
    setup(); preload("json"); hear(w.Preloaded, number + 1)
    pid = server()
    ranks = range(number * 10, number * 10 + 10)
    for rank in ranks:
        spawn(rank)
    time.sleep(number * 0.0015)  # another moment each time; whichever it is, the outcome is the same
    os.kill(pid, signal.SIGKILL)
    hear(w.PreloadFailed, number + 1)
    for rank in ranks:
        hear(WorkerExit, rank=rank, returncode=0)
        assert ran(rank) == 1
    sweep()
    assert tree.children_of(spawner) == []
dismiss()
""",
    "a_worker_with_a_command_or_load_time_variable_of_its_own_is_started_cold": """
setup(); preload("json"); hear(w.Preloaded)
open("other.py", "w").write("import sys\\nsys.exit('json' in sys.modules)")
open("worker.py", "w").write("import sys\\nsys.exit('json' in sys.modules)")
spawn(0, argv=(sys.executable, "other.py")); spawn(1, PYTHONHASHSEED="5"); spawn(2, LD_LIBRARY_PATH="/x"); spawn(3)
assert [hear(WorkerExit, rank=rank).returncode for rank in range(4)] == [0, 0, 0, 1]
dismiss()
""",
    "variables_are_those_of_this_worker_and_attempt": """
open("worker.py", "w").write('''
import os, sys
with open(f"env-{os.environ['RANK']}", "w") as file:
    file.write(repr(dict(os.environ)))
''')
setup(GOES="1", STAYS="2", CHANGES="3", EMPTY="x"); preload("json"); spawn(0)
hear(WorkerExit, rank=0, returncode=0)
setup(STAYS="2", CHANGES="4", EMPTY="", COMES="5"); spawn(1, OWN="6")
hear(WorkerExit, rank=1, returncode=0)
first, second = (eval(open(f"env-{rank}").read()) for rank in (0, 1))
for env in (first, second):
    assert not any("WARM" in name or "BOOT" in name for name in env), env
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in env
assert [first.get(name) for name in ("GOES", "STAYS", "CHANGES", "EMPTY", "COMES", "OWN")] == ["1", "2", "3", "x", None, None]
assert [second.get(name) for name in ("GOES", "STAYS", "CHANGES", "EMPTY", "COMES", "OWN")] == [None, "2", "4", "", "5", "6"]
dismiss()
""",
    "a_thread_count_of_its_own_reaches_the_libraries_that_are_loaded": """
open("gomp.py", "w").write("import ctypes\\nlibrary = ctypes.CDLL('libgomp.so.1')\\n")
open("worker.py", "w").write("import gomp, sys\\nsys.exit(gomp.library.omp_get_max_threads())")
setup(OMP_NUM_THREADS="5"); preload("gomp"); hear(w.Preloaded)
spawn(0); spawn(1, OMP_NUM_THREADS="3")
assert [hear(WorkerExit, rank=rank).returncode for rank in range(2)] == [5, 3]
dismiss()
""",
    "cpus_that_do_not_exist_are_told_as_in_a_cold_start": """
setup(); preload("json"); hear(w.Preloaded)
spawn(0, cpus=(4095,))
assert hear(w.SpawnFailed, rank=0).step == "affinity"
assert ran(0) == 0
dismiss()
""",
    "a_working_directory_that_has_gone_is_told_as_in_a_cold_start": """
os.mkdir("gone"); os.chdir("gone"); open("worker.py", "w").write("")
setup(); preload("json"); hear(w.Preloaded)
channel.send(w.Setup(env=common, cwd=os.getcwd() + "/../not there", cookie="c", nofile=256, signal_group=False))
spawn(0)
assert hear(w.SpawnFailed, rank=0).step == "chdir"
dismiss()
""",
    "an_environment_too_large_for_one_message_leads_to_a_cold_start_of_that_worker": """
setup(); preload("json"); hear(w.Preloaded)
spawn(0, **{f"LARGE_{number}": "x" * 100_000 for number in range(8)}); spawn(1)
for rank in (0, 1):
    hear(WorkerExit, rank=rank, returncode=0)
    assert ran(rank) == 1
assert not any(isinstance(x, w.PreloadFailed) for x in heard)
dismiss()
""",
    "a_worker_killed_as_it_starts_is_reported_once": """
setup(); preload("json"); hear(w.Preloaded)
pid = server()
os.kill(pid, signal.SIGSTOP)
spawn(0, WAITS="1")
channel.send(w.Signal(ranks=(), signum=signal.SIGCONT, scope=w.SCOPE_TREE, caught_only=False))
worker = hear(w.Spawned, rank=0).pid
os.kill(worker, signal.SIGKILL)
assert hear(WorkerExit, rank=0).returncode == -9
sweep(); dismiss()
""",
    "a_server_stopped_with_the_job_carries_out_its_orders_afterwards": """
setup(); preload("json"); hear(w.Preloaded)
spawn(0, WAITS="1"); hear(w.Spawned, rank=0)
signal_to(0, signum=signal.SIGSTOP, scope=w.SCOPE_TREE)
until(lambda: tree.stat_of(server())[0] == "T")
spawn(1)
signal_to(0, signum=signal.SIGCONT, scope=w.SCOPE_TREE)
hear(WorkerExit, rank=1, returncode=0)
assert not any(isinstance(x, w.PreloadFailed) for x in heard)
signal_to(0); hear(WorkerExit, rank=0, returncode=-15)
sweep(); dismiss()
""",
}


@pytest.mark.parametrize("case", CASES)
def test(case, tmp_path, clean_env):
    done = subprocess.run(
        [sys.executable, "-c", DRIVER + CASES[case]],
        cwd=tmp_path,
        env=clean_env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    errors = tmp_path / "errors"
    assert done.returncode == 0, done.stderr + (errors.read_text() if errors.exists() else "")
