"""``plan`` and ``--dry-run``: the same facts give the same plan; no host is contacted, nothing is
written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SECRET = "hunter2-very-secret"


def script(distlaunch, source: str = "") -> str:
    (distlaunch.work / "train.py").write_text(source)
    return "train.py"


def plan(distlaunch, *words: str, env=None) -> dict:
    result = distlaunch.run(["plan", "--format", "json", *words], env=env)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def files_below(path: Path) -> list[str]:
    # What the test harness itself writes (the launcher's streams) is not counted.
    return sorted(
        str(entry) for entry in path.rglob("*") if not entry.name.startswith(("stdout-", "stderr-"))
    )


def test_the_same_facts_give_the_same_plan(distlaunch):
    words = [
        "--num-procs",
        "4",
        "--bind",
        "cores",
        "--job-id",
        "j",
        "-x",
        "B=1",
        "-x",
        "A=2",
        script(distlaunch),
        "x",
    ]
    texts = {distlaunch.run(["plan", "--format", "json", *words]).stdout for _ in range(3)}
    assert len(texts) == 1


def test_only_the_job_id_differs_where_none_is_given(distlaunch):
    one, other = (plan(distlaunch, "--num-procs", "2", script(distlaunch)) for _ in range(2))
    assert one["job_id"] != other["job_id"]
    renamed = json.loads(json.dumps(other).replace(other["job_id"], one["job_id"]))
    assert renamed == one


def test_hash_seeds_and_the_order_of_the_environment_do_not_matter(distlaunch):
    words = ["--num-procs", "3", "--job-id", "j", script(distlaunch)]
    several = [
        {"A": "1", "B": "2", "PYTHONHASHSEED": "1"},
        {"B": "2", "A": "1", "PYTHONHASHSEED": "1234"},
    ]
    one, other = (
        distlaunch.run(["plan", "--format", "json", *words], env=env).stdout for env in several
    )
    assert one == other


def test_values_that_are_settled_at_the_start_are_null(distlaunch):
    record = plan(distlaunch, "--num-procs", "2", script(distlaunch), "--epochs", "3")
    assert record["master_port"] is None
    assert record["master_addr"] == "127.0.0.1"
    assert record["world_size"] == 2
    assert "MASTER_PORT" not in record["env"]
    (node,) = record["nodes"]
    assert [worker["rank"] for worker in node["workers"]] == [0, 1]
    for worker in node["workers"]:
        assert "MASTER_PORT" not in worker["env"]
        assert worker["argv"][1:] == ["train.py", "--epochs", "3"]
    assert record["run_dir"] == str(distlaunch.jobs / record["job_id"])


def test_common_values_of_all_workers_are_repeated_only_with_expand(distlaunch):
    words = ["--num-procs", "2", "--job-id", "j", script(distlaunch)]
    short, long = plan(distlaunch, *words), plan(distlaunch, "--expand", *words)
    assert short["env"] == long["env"]
    assert short["env"]["WORLD_SIZE"] == "2"
    for brief, full in zip(short["nodes"][0]["workers"], long["nodes"][0]["workers"], strict=True):
        assert brief["env"].keys().isdisjoint(short["env"])
        assert full["env"] == {**short["env"], **brief["env"]}


@pytest.mark.parametrize(
    ("words", "world_size", "devices"),
    [
        (["--device", "cuda"], None, None),
        (["--gpus-per-node", "8"], 8, None),
        (["--gpus", "0,2"], 2, ["0", "2"]),
        (["--hosts", "localhost:4", "--device", "cuda"], 4, None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_plan_for_a_machine_with_other_gpus_is_shown_with_a_note(
    distlaunch, words, world_size, devices
):
    name = script(distlaunch)
    record = plan(distlaunch, *words, "--explain", name)
    assert (record["world_size"], record["device"]) == (world_size, "cuda")
    (node,) = record["nodes"]
    assert node["devices"] == devices
    (note,) = [note for note in record["notes"] if "another machine" in note]
    assert "no GPU" in note
    shown = distlaunch.run(["plan", *words, name])
    assert (shown.returncode, shown.stderr) == (0, "")
    assert note in " ".join(shown.stdout.split())
    for command in (["train", "--dry-run"], ["train"]):
        refused = distlaunch.run([*command, *words, name])
        assert (refused.returncode, refused.stdout, refused.run_dir) == (2, "", None)
        assert "no GPU" in refused.stderr


def test_a_plan_for_other_nodes_shows_the_command_and_names_a_script_that_is_not_here(distlaunch):
    name = script(distlaunch)
    words = ["plan", "--hosts", "far1,far2"]
    note = f"trian.py is not here (looked in {distlaunch.work}); the nodes have to have it"
    misspelt = distlaunch.run([*words, "trian.py", name])
    assert (misspelt.returncode, misspelt.stderr) == (0, "")
    assert f"trian.py {name}\n" in misspelt.stdout
    assert f"\n  {note}\n" in misspelt.stdout
    assert note in plan(distlaunch, *words[1:], "trian.py")["notes"]
    for there in ([name], ["-m", "trian"], ["--no-python", "trian"]):
        assert "not here" not in distlaunch.run([*words, *there]).stdout


def test_a_plan_that_fails_for_another_reason_is_refused(distlaunch):
    name = script(distlaunch)
    for words in (
        ["--num-gpus", "4", "--num-procs", "2"],
        ["--hosts", "localhost,far", "--gpus-per-node", "2"],
    ):
        result = distlaunch.run(["plan", *words, name])
        assert (result.returncode, result.stdout) == (2, "")


def test_an_explicit_port_is_in_the_plan_though_it_is_taken(distlaunch):
    """A plan contacts no host, so it cannot know; the job itself refuses."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert (
            plan(distlaunch, "--num-procs", "1", "--master-port", str(port), script(distlaunch))[
                "master_port"
            ]
            == port
        )


@pytest.mark.parametrize(
    "words",
    [
        ["plan"],
        ["plan", "--format", "json"],
        ["plan", "--hosts", "localhost:2,a:2"],
        ["train", "--dry-run"],
        ["train", "--dry-run", "--format", "jsonl"],
    ],
)
def test_nothing_is_written_and_nothing_started(distlaunch, words):
    name = script(distlaunch, "open('started', 'w')")
    before = files_below(distlaunch.tmp_path)
    result = distlaunch.run([*words, "--num-procs", "2", "--log-dir", "logs", name])
    assert result.returncode == 0
    assert files_below(distlaunch.tmp_path) == before


def test_a_plan_opens_no_socket_and_starts_no_process(distlaunch):
    strace = shutil.which("strace")
    trace = distlaunch.tmp_path / "trace"
    command = [
        sys.executable,
        "-m",
        "distlaunch",
        "plan",
        "--format",
        "json",
        "--num-procs",
        "2",
        script(distlaunch),
    ]
    if strace is None:  # an audit hook sees what Python itself does: the next best
        hook = (
            "import sys, runpy\n"
            "def refuse(event, args):\n"
            "    if event in ('socket.connect', 'socket.bind', 'socket.sendto', 'socket.getaddrinfo', 'os.fork',\n"
            "                 'os.posix_spawn', 'subprocess.Popen', 'os.mkdir', 'os.rename', 'os.remove'):\n"
            "        raise SystemExit(f'{event} {args}')\n"
            "    if event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+'):\n"
            "        raise SystemExit(f'{event} {args}')\n"
            "sys.addaudithook(refuse)\n"
            "sys.argv = sys.argv[1:]\n"
            "runpy.run_module('distlaunch', run_name='__main__', alter_sys=False)\n"
        )
        command = [sys.executable, "-B", "-c", hook, *command[2:]]
        command.remove("-m")
    else:
        command = [
            strace,
            "-f",
            "-e",
            "trace=connect,bind,sendto,fork,vfork,clone,clone3,execve",
            "-o",
            str(trace),
            *command,
        ]
    done = subprocess.run(
        command,
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 2
    if strace is not None:
        calls = [
            line for line in trace.read_text().splitlines() if "(" in line and "execve" not in line
        ]
        assert calls == []


def test_a_dry_run_prints_the_plan_of_the_job(distlaunch):
    words = ["--num-procs", "2", "--job-id", "j", script(distlaunch)]
    dry = distlaunch.run(["train", "--dry-run", "--format", "jsonl", *words])
    assert json.loads(dry.stdout) == plan(distlaunch, *words)
    table = distlaunch.run(["train", "--dry-run", *words])
    assert table.returncode == 0
    assert table.stdout == distlaunch.run(["plan", *words]).stdout
    for word in ("j", "2 workers on 1 node", "127.0.0.1", "train.py", "WORLD_SIZE=2"):
        assert word in table.stdout


def test_the_plan_that_ran_is_the_plan_that_was_shown_and_bound(distlaunch):
    words = ["--num-procs", "2", "--job-id", "j", "--max-restarts", "1", script(distlaunch)]
    shown = plan(distlaunch, *words)
    result = distlaunch.train(*words)
    ran = json.loads((result.run_dir / "plan-0.json").read_text())
    port = ran["master_port"]
    assert 0 < port < 65536
    assert ran["env"].pop("MASTER_PORT") == str(port)
    assert {**ran, "master_port": None} == shown


def test_secrets_are_in_no_plan_no_event_no_table_and_no_argument_list(distlaunch):
    source = "import os, time\nprint('up', flush=True)\nassert os.environ['TOKEN'] == os.environ['FILE_TOKEN'] == os.environ['API_KEY']\nwhile not os.path.exists('go'): time.sleep(0.01)\nos.path.exists('fail') and 1/0\n"
    (distlaunch.work / "vars").write_text(f"FILE_TOKEN={SECRET}\n")
    env = {"API_KEY": SECRET, "TOKEN": SECRET}
    given = ["--num-procs", "2", "--env", "TOKEN", "--env-file", "vars"]
    name = script(distlaunch, source)
    for words in (["plan"], ["plan", "--format", "json"], ["train", "--dry-run"]):
        result = distlaunch.run([*words, *given, name], env=env)
        assert result.returncode == 0
        assert SECRET not in result.stdout + result.stderr
        assert "TOKEN" in result.stdout, "that it is given is no secret"

    (distlaunch.work / "fail").touch()
    running = distlaunch.start(["train", *given, "--format", "jsonl", name], env=env)
    running.wait_workers(2)
    running.wait_rank_logs("up", 2)
    pids = [running.pid, *distlaunch.survivors()]
    assert len(pids) >= 4, "launcher, spawner, two workers"
    for pid in pids:
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    (distlaunch.work / "go").touch()
    result = running.wait()
    assert result.returncode == 1
    assert SECRET not in result.stdout + result.stderr
    for path in result.run_dir.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_a_value_on_our_own_command_line_goes_no_further(distlaunch):
    """A value of --env is in the launcher's own argument list, but in no worker's, no file and no
    event."""
    source = (
        "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)"
    )
    running = distlaunch.start(
        ["train", "--num-procs", "2", "--env", f"TOKEN={SECRET}", script(distlaunch, source)]
    )
    running.wait_for(
        lambda: sum(len(e["pids"]) for e in running.events if e["type"] == "workers_started") == 2,
        "start",
    )
    workers = [
        pid
        for event in running.events
        if event["type"] == "workers_started"
        for pid in event["pids"].values()
    ]
    running.wait_stdout("up")
    for pid in workers:
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    (distlaunch.work / "go").touch()
    result = running.wait()
    assert result.returncode == 0
    for path in result.run_dir.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_threads_are_a_share_of_the_cpus_that_slurm_grants(distlaunch):
    capture = (Path(__file__).parents[1] / "data" / "slurm" / "types.env").read_text()
    env = dict(line.split("=", 1) for line in capture.splitlines() if not line.startswith("#"))
    assert env["SLURM_CPUS_ON_NODE"] == "1"
    (distlaunch.work / "t.py").touch()
    result = distlaunch.run(["plan", "--format", "json", "--num-procs", "1", "t.py"], env=env)
    (node,) = json.loads(result.stdout)["nodes"]
    assert node["workers"][0]["env"]["OMP_NUM_THREADS"] == "1"
