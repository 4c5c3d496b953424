"""The environment of a worker, for any environment of the launcher."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"
DUMP = PROGRAMS / "output_environment.py"


def environments(
    distlaunch, *words: str, env=None, procs: int = 2, **kwargs
) -> list[dict[str, str]]:
    """Run ``procs`` workers and return each one's environment."""
    result = distlaunch.train("--num-procs", str(procs), *words, DUMP, env=env, **kwargs)
    assert result.returncode == 0, result.stderr
    return [saved(distlaunch, rank)["env"] for rank in range(procs)]


def saved(distlaunch, rank: int) -> dict:
    return json.loads((distlaunch.work / f"env-{rank}.json").read_text())


def test_each_variable_of_the_design_has_its_value(distlaunch):
    result = distlaunch.train("--num-procs", "2", "--max-restarts", "3", "--job-id", "named", DUMP)
    assert result.returncode == 0
    [started] = result.of_type("attempt_started")
    for rank in (0, 1):
        env = saved(distlaunch, rank)["env"]
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(started["master_port"]),
            "TORCHELASTIC_RUN_ID": "named",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": str(
                result.run_dir / "attempt-0" / f"rank-{rank}.error.json"
            ),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "PYTHONUNBUFFERED": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": env["OMP_NUM_THREADS"],
            "DISTLAUNCH_JOB_ID": "named",
            "DISTLAUNCH_ATTEMPT": "0",
            "DISTLAUNCH_BACKEND": "pytorch-ddp",
            "DISTLAUNCH_RUN_DIR": str(result.run_dir),
            "DISTLAUNCH_COOKIE": env["DISTLAUNCH_COOKIE"],
            "DISTLAUNCH_PROGRESS_FD": "100",
        }
        inherited = dict(distlaunch.env)
        assert env == {**inherited, **expected}


def test_the_master_port_can_be_bound_by_rank_0_and_by_nobody_else(distlaunch):
    source = """
import os, socket, sys
port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(("127.0.0.1", port)) as server:  # sets SO_REUSEADDR, as torch's store does
        open("listening", "w").close()
        server.accept()[0].sendall(b"here")
else:
    import time
    while not os.path.exists("listening"):
        time.sleep(0.01)
    assert socket.create_connection((os.environ["MASTER_ADDR"], port)).recv(9) == b"here"
"""
    (distlaunch.work / "store.py").write_text(source)
    assert distlaunch.train("--num-procs", "2", "store.py").returncode == 0


def test_threads_are_this_workers_share_of_the_cpus(distlaunch):
    cpus = len(os.sched_getaffinity(0))
    [one] = environments(distlaunch, procs=1)
    assert 1 <= int(one["OMP_NUM_THREADS"]) <= cpus
    for env in environments(distlaunch, procs=4):
        assert int(env["OMP_NUM_THREADS"]) == max(1, int(one["OMP_NUM_THREADS"]) // 4)


def test_a_restart_is_numbered_and_has_a_port_of_its_own(distlaunch):
    source = """
import os
names = ("TORCHELASTIC_RESTART_COUNT", "DISTLAUNCH_ATTEMPT", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")
print(*(os.environ[name] for name in names))
raise SystemExit(3 if os.environ["DISTLAUNCH_ATTEMPT"] != "2" else 0)
"""
    (distlaunch.work / "again.py").write_text(source)
    result = distlaunch.train(
        "--num-procs", "1", "--max-restarts", "2", "--min-uptime", "0", "again.py"
    )
    assert result.returncode == 0, result.stderr
    ports = [event["master_port"] for event in result.of_type("attempt_started")]
    assert len(ports) == 3
    for attempt, port in enumerate(ports):
        error_file = result.run_dir / f"attempt-{attempt}" / "rank-0.error.json"
        log = (result.run_dir / f"attempt-{attempt}" / "rank-0.log").read_text()
        assert log == f"{attempt} {attempt} {port} {error_file}\n"


OUTER = {
    "RANK": "77",
    "LOCAL_RANK": "77",
    "WORLD_SIZE": "78",
    "MASTER_ADDR": "outer.example",
    "MASTER_PORT": "77",
    "GROUP_RANK": "7",
    "TORCHELASTIC_RUN_ID": "outer",
    "TORCHELASTIC_ERROR_FILE": "/outer",
    "PET_NNODES": "7",
    "OMPI_COMM_WORLD_RANK": "7",
    "PMI_RANK": "7",
    "PMIX_RANK": "7",
    "HOROVOD_RANK": "7",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "outer",
    "TF_CONFIG": "{}",
    "DISTLAUNCH_COOKIE": "outer",
    "DISTLAUNCH_QUIET": "1",
    "DISTLAUNCH_ANYTHING": "outer",
}


def test_variables_of_an_outer_launcher_do_not_leak(distlaunch):
    for env in environments(distlaunch, "--source", "flags", env=OUTER):
        for name, value in OUTER.items():
            assert env.get(name) != value, name
        assert not [
            name for name in env if name.startswith(("PET_", "OMPI_", "PMI", "HOROVOD_", "TF_"))
        ]
        ours = {name for name in env if name.startswith("DISTLAUNCH_")}
        names = ("JOB_ID", "ATTEMPT", "BACKEND", "RUN_DIR", "COOKIE", "PROGRESS_FD")
    assert ours == {f"DISTLAUNCH_{name}" for name in names}


def test_settings_in_the_users_environment_stay(distlaunch):
    chosen = {
        "PYTHONUNBUFFERED": "",
        "OMP_NUM_THREADS": "3",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "NCCL_DEBUG": "INFO",
        "HOROVOD_CYCLE_TIME": "5",
    }
    for env in environments(distlaunch, env=chosen):
        assert {name: env.get(name) for name in chosen} == chosen


def test_env_and_env_file_win_over_what_is_inherited_and_over_our_defaults(distlaunch):
    text = "\ufeff# comment\r\nFROM_FILE=\"two words\"\r\nexport EXPORTED='x=y'\r\n\r\nBOTH=file\r\nEMPTY=\r\n"
    (distlaunch.work / "vars").write_bytes(text.encode())
    words = [
        "--env-file",
        "vars",
        "-x",
        "BOTH=option",
        "--env",
        "PASSED_ON",
        "-xOMP_NUM_THREADS=5",
        "-x",
        "EQUALS=a=b",
    ]
    for env in environments(distlaunch, *words, env={"PASSED_ON": "here", "BOTH": "inherited"}):
        expected = {
            "FROM_FILE": "two words",
            "EXPORTED": "x=y",
            "BOTH": "option",
            "EMPTY": "",
            "PASSED_ON": "here",
            "OMP_NUM_THREADS": "5",
            "EQUALS": "a=b",
        }
        assert {name: env.get(name) for name in expected} == expected


def test_values_that_are_no_text_pass_byte_for_byte(distlaunch):
    source = "import os\nopen('raw', 'wb').write(b'|'.join(os.environb[name] for name in (b'LATIN', b'GIVEN')))"
    (distlaunch.work / "raw.py").write_text(source)
    odd = os.fsdecode(b"caf\xe9 \x01")
    result = distlaunch.train(
        "--num-procs", "1", "--env", f"GIVEN={odd}", "raw.py", env={"LATIN": odd}
    )
    assert result.returncode == 0
    assert (distlaunch.work / "raw").read_bytes() == b"caf\xe9 \x01|caf\xe9 \x01"


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_arguments_reach_the_script_byte_for_byte(distlaunch, separator):
    source = "import json, os, sys\nopen('argv', 'wb').write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    (distlaunch.work / "argv.py").write_text(source)
    arguments = [
        "--num-procs",
        "7",
        "",
        "a b",
        "$HOME",
        "*",
        "'q'",
        '"',
        "\\",
        "--",
        "-x",
        os.fsdecode(b"\xff"),
        "ä\n",
    ]
    result = distlaunch.train("--num-procs", "1", *separator, "argv.py", *arguments)
    assert result.returncode == 0
    assert (distlaunch.work / "argv").read_bytes().split(b"\0") == [
        os.fsencode(word) for word in arguments
    ]


def test_workdir_and_python_are_the_workers(distlaunch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "where.py").write_text(
        "import os, sys\nprint(os.getcwd(), sys.executable, os.environ.get('MARK'))"
    )
    python = tmp_path / "my-python"
    python.write_text(f'#!/bin/sh\nexport MARK=mine\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    words = ["--workdir", elsewhere, "--python", python, "where.py"]
    result = distlaunch.train("--num-procs", "1", *words)
    assert result.stdout == f"[0] {elsewhere} {sys.executable} mine\n"


def test_setup_runs_before_the_worker_in_its_shell(distlaunch):
    for env in environments(distlaunch, "--setup", "export FROM_SETUP=$((40 + 2)); alias x=y"):
        assert env["FROM_SETUP"] == "42"


def test_a_setup_that_fails_starts_no_script(distlaunch):
    result = distlaunch.train("--num-procs", "1", "--setup", "exit 6", DUMP)
    assert result.returncode == 6
    assert not list(distlaunch.work.glob("env-*"))


def test_bind_cores_gives_each_worker_cpus_of_its_own(distlaunch):
    environments(distlaunch, "--bind", "cores")
    cpus = [set(saved(distlaunch, rank)["cpus"]) for rank in (0, 1)]
    assert all(cpus)
    allowed = os.sched_getaffinity(0)
    assert cpus[0] | cpus[1] <= allowed
    if len(allowed) > 1:
        assert not cpus[0] & cpus[1]


def test_a_job_within_a_worker_of_a_job_is_a_job_of_its_own(distlaunch):
    source = f"""
import os, subprocess, sys
os.mkdir(f"inner-{{os.environ['RANK']}}")
words = ["train", "--num-procs", "3", "--output", "0", {str(DUMP)!r}]
sys.exit(subprocess.run([sys.executable, "-m", "distlaunch", *words], cwd=f"inner-{{os.environ['RANK']}}").returncode)
"""
    (distlaunch.work / "outer.py").write_text(source)
    result = distlaunch.train("--num-procs", "2", "--job-id", "outer", "outer.py")
    assert result.returncode == 0, result.stderr
    ports, ids = set(), set()
    for outer in (0, 1):
        for inner in range(3):
            env = json.loads(
                (distlaunch.work / f"inner-{outer}" / f"env-{inner}.json").read_text()
            )["env"]
            assert (env["RANK"], env["WORLD_SIZE"]) == (str(inner), "3")
            ports.add(env["MASTER_PORT"])
            ids.add(env["DISTLAUNCH_JOB_ID"])
    # The inner jobs' directories lie beside the outer one's: their state directory is the same.
    events = map(json.loads, (distlaunch.jobs / "outer" / "events.jsonl").read_text().splitlines())
    [started] = [event for event in events if event["type"] == "attempt_started"]
    assert len(ports | {str(started["master_port"])}) == 3
    assert len(ids | {"outer"}) == 3
    distlaunch.assert_no_survivors()


def test_hidden_gpus_stay_hidden_whatever_mask_was_set(distlaunch):
    for env in environments(distlaunch, env={"CUDA_VISIBLE_DEVICES": "0,1"}):
        assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_twenty_jobs_at_once_have_twenty_ports(distlaunch):
    (distlaunch.work / "meet.py").write_text(
        "import os, socket, time\n"
        "server = socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        "open('up-' + os.environ['MASTER_PORT'], 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
    )
    jobs = [
        distlaunch.start(["train", "--num-procs", "1", "--job-id", f"job-{n}", "meet.py"])
        for n in range(20)
    ]
    jobs[0].wait_for(
        lambda: len(list(distlaunch.work.glob("up-*"))) == 20, "twenty listening workers"
    )
    (distlaunch.work / "go").touch()
    assert [job.wait().returncode for job in jobs] == [0] * 20


def test_a_host_name_that_resolves_to_nothing_does_not_matter(distlaunch):
    assert shutil.which("unshare"), "util-linux is needed"
    (distlaunch.work / "host.py").write_text("import os\nprint(os.environ['MASTER_ADDR'])")
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    program = "import socket, sys, runpy; socket.sethostname('no-such-host.invalid'); sys.argv[0] = 'distlaunch'; runpy.run_module('distlaunch', run_name='__main__')"
    import subprocess

    command = [
        "unshare",
        "--uts",
        *user,
        sys.executable,
        "-c",
        program,
        "train",
        "--num-procs",
        "1",
        "host.py",
    ]
    done = subprocess.run(
        command, env=distlaunch.env, cwd=distlaunch.work, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "[0] 127.0.0.1\n")
    assert socket.gethostname() != "no-such-host.invalid"
