"""Jobs over several hosts by SSH."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import HEAD, faults, until
from tests.facts import mentions

PROGRAMS = Path(__file__).parents[1] / "programs" / "nodes"
PRINTS_VARIABLES, STAYS = PROGRAMS / "prints_variables.py", PROGRAMS / "stays.py"
SHORT = ("--failure-grace", "2", "--grace", "2")


def reported(result) -> list[dict]:
    """Return the reports of the workers, by rank."""
    assert result.returncode == 0, result.stderr
    files = sorted(
        (result.run_dir / "attempt-0").glob("rank-*.log"), key=lambda path: int(path.stem[5:])
    )
    return [json.loads(path.read_text()) for path in files]


def test_ranks_are_contiguous_on_hosts_in_the_order_of_the_list(hosts):
    result = hosts.train("--hosts", "n3:2,n1:1,n2:3", "--device", "cpu", PRINTS_VARIABLES)
    reports = reported(result)
    assert [each["host"] for each in reports] == ["n3", "n3", "n1", "n2", "n2", "n2"]
    assert [each["RANK"] for each in reports] == list("012345")
    assert [each["LOCAL_RANK"] for each in reports] == list("010012")
    assert [each["NODE_RANK"] for each in reports] == list("001222")
    assert {each["WORLD_SIZE"] for each in reports} == {"6"}
    assert {each["GROUP_WORLD_SIZE"] for each in reports} == {"3"}
    assert {each["MASTER_ADDR"] for each in reports} == {hosts.address("n3")}
    assert len({each["MASTER_PORT"] for each in reports}) == 1
    assert {each["cwd"] for each in reports} == {str(hosts.work)}
    hosts.assert_clean()


def test_the_launchers_own_host_may_be_one_of_the_nodes(hosts):
    result = hosts.train("--hosts", "n1:1,n2:1", "--device", "cpu", PRINTS_VARIABLES, host="n2")
    assert [each["host"] for each in reported(result)] == ["n1", "n2"]
    hosts.assert_clean()


def test_a_host_under_its_name_and_its_address_is_one_machine(hosts):
    address = hosts.address("n2")
    result = hosts.train("--hosts", f"n1:1,n2:1,{address}:1", "--device", "cpu", PRINTS_VARIABLES)
    assert result.returncode == 2
    assert mentions(result.stderr, "error", f"n2 and {address}")
    hosts.assert_clean()


def test_slots_that_nobody_names_are_one_worker_on_hosts_without_gpus(hosts):
    result = hosts.train("--hosts", "n1,n2", PRINTS_VARIABLES)
    assert [each["host"] for each in reported(result)] == ["n1", "n2"]


def test_arguments_and_environment_arrive_byte_for_byte(hosts):
    words = [
        "a b",
        "'",
        '"',
        "$HOME",
        "`id`",
        "%h %%",
        "new\nline",
        "🤗 é",
        "\\",
        "!!",
        "*",
        "",
        "--",
    ]
    big = "x" * 120_000
    env = {f"WORD_{index}": word for index, word in enumerate(words)}
    env |= {
        "BIG_1": big,
        "BIG_2": big[::-1],
        "BIG_3": big,
        "ASK": " ".join([*env, "BIG_1", "BIG_2", "BIG_3"]),
    }
    result = hosts.train(
        "--hosts", "n1:1,n2:1", "--device", "cpu", PRINTS_VARIABLES, *words, env=env
    )
    for each in reported(result):
        assert each["argv"] == words
        assert {name: each[name] for name in env if name != "ASK"} == {
            n: v for n, v in env.items() if n != "ASK"
        }


def test_variables_of_a_host_are_the_hosts_own(hosts):
    env = {
        "HOME": str(hosts.work),
        "ASK": "HOME DISPLAY TMPDIR MINE SSH_CONNECTION",
        "DISPLAY": ":7",
        "TMPDIR": "/x",
        "MINE": "1",
    }
    result = hosts.train(
        "--ssh-config",
        hosts.ssh_config,
        "--hosts",
        "n1:1,n2:1",
        "--device",
        "cpu",
        "--log-dir",
        hosts.work,
        PRINTS_VARIABLES,
        env=env,
    )
    assert result.returncode == 0, result.stderr
    [log] = hosts.work.glob("2*/attempt-0/rank-1.log")
    reports = json.loads(log.read_text())
    assert reports["MINE"] == "1"
    assert reports["HOME"] == hosts.home
    assert (reports["DISPLAY"], reports["TMPDIR"], reports["SSH_CONNECTION"]) == (None, None, None)


def test_the_first_failure_ends_the_job_on_all_hosts_with_its_exit_code(hosts):
    result = hosts.train(
        "--hosts",
        "n1:2,n2:2,n3:1",
        "--device",
        "cpu",
        *SHORT,
        STAYS,
        "3=exit:7",
        env={"SIGN_DIR": str(hosts.work)},
    )
    assert result.returncode == 7
    assert "rank 3 of 5 on n2 failed: exit code 7" in result.stderr
    hosts.assert_clean()


def test_workers_that_do_not_obey_are_killed_after_the_grace_on_all_hosts(hosts):
    result = hosts.train(
        "--hosts",
        "n1:2,n2:2",
        "--device",
        "cpu",
        "--failure-grace",
        "0.5",
        STAYS,
        "ignore-signals",
        "0=raise:it broke",
        env={"SIGN_DIR": str(hosts.work)},
    )
    assert result.returncode == 1
    assert "RuntimeError: it broke" in result.stderr
    hosts.assert_clean()


def test_a_restart_is_the_whole_jobs(hosts):
    script = hosts.work / "once.py"
    script.write_text(
        "import os, sys\nprint('attempt', os.environ['DISTLAUNCH_ATTEMPT'], os.environ['MASTER_PORT'], flush=True)\n"
        "sys.exit(5 if os.environ['RANK'] == '1' and os.environ['DISTLAUNCH_ATTEMPT'] == '0' else 0)\n"
    )
    result = hosts.train(
        "--hosts",
        "n1:1,n2:1,n3:1",
        "--device",
        "cpu",
        *SHORT,
        "--max-restarts",
        "2",
        "--min-uptime",
        "0",
        script,
    )
    assert result.returncode == 0, result.stderr
    assert "restart 1 of 2" in result.stderr
    for rank in range(3):
        assert "attempt 1" in (result.run_dir / "attempt-1" / f"rank-{rank}.log").read_text()
    hosts.assert_clean()


def test_a_restart_waits_for_its_delay_with_all_nodes_connected(hosts):
    script = hosts.work / "once.py"
    script.write_text(
        "import os, sys\n"
        "sys.exit(5 if os.environ['RANK'] == '1' and os.environ['DISTLAUNCH_ATTEMPT'] < '2' else 0)\n"
    )
    options = ("--max-restarts", "2", "--min-uptime", "0", "--restart-delay", "0.5:60")
    result = hosts.train("--hosts", "n1:1,n2:1", "--device", "cpu", *SHORT, *options, script)
    assert result.returncode == 0, result.stderr
    reports, begun = (
        [event["time"] for event in result.of_type(kind)]
        for kind in ("restarting", "attempt_started")
    )
    waited_s = [after - before for before, after in zip(reports, begun[1:], strict=True)]
    assert waited_s[0] >= 0.45
    assert waited_s[1] >= 0.95, "the delay doubles"
    assert len(result.of_type("node_joined")) == 2, "no node is connected to again"
    hosts.assert_clean()


def test_a_signal_while_a_restart_is_delayed_ends_the_job_on_all_nodes(hosts):
    script = hosts.work / "fails.py"
    script.write_text("raise SystemExit(5)\n")
    options = ("--max-restarts", "1", "--min-uptime", "0", "--restart-delay", "1h")
    args = ["train", "--hosts", "n1:1,n2:1", "--device", "cpu", *SHORT, *options, script]
    running = hosts.start(args)
    running.wait_stderr("restarting in")
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    hosts.assert_clean()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_job_everywhere(hosts, number, code):
    running = hosts.start(
        ["train", "--hosts", "n1:1,n2:2", "--device", "cpu", *SHORT, STAYS],
        env={"SIGN_DIR": str(hosts.work)},
    )
    running.wait_stdout("all are here")
    running.send_signal(number)
    assert running.wait().returncode == code
    hosts.assert_clean()


def test_a_second_interrupt_kills_at_once_everywhere(hosts):
    args = [
        "train",
        "--hosts",
        "n1:1,n2:2",
        "--device",
        "cpu",
        "--grace",
        "1000",
        STAYS,
        "ignore-signals",
    ]
    running = hosts.start(args, env={"SIGN_DIR": str(hosts.work)})
    running.wait_stdout("all are here")
    running.send_signal(signal.SIGINT)
    running.wait_stderr("press Ctrl-C again after 1 s to kill all workers now")
    time.sleep(1.2)  # a nearer one does not count
    running.send_signal(signal.SIGINT)
    assert running.wait().returncode == 130
    hosts.assert_clean()


def test_signals_after_the_verdict_change_neither_exit_code_nor_report(hosts):
    script = hosts.work / "ends.py"
    script.write_text("import sys; sys.exit(7)")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        running = hosts.start(["train", "--hosts", "n1:1,n2:1", "--device", "cpu", script])
        sent = running.signal_to_the_end(number)
        result = running.wait()
        assert result.returncode == 7, f"{number.name}, sent {sent} times: {result.stderr}"
        assert "exit code 7" in result.stderr
    hosts.assert_clean()


def test_usr1_reaches_workers_that_catch_it_on_all_hosts(hosts):
    script = hosts.work / "catches.py"
    script.write_text(
        "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\nprint('ready', flush=True)\nsignal.pause()\n"
    )
    running = hosts.start(
        ["train", "--hosts", "n1:1,n2:1", "--device", "cpu", "--format", "jsonl", script]
    )
    running.wait_rank_logs("ready", 2)
    running.send_signal(signal.SIGUSR1)
    assert running.wait().returncode == 0


def test_every_byte_of_output_is_filed_and_shown(hosts):
    script = hosts.work / "writes.py"
    script.write_text(
        "import os, sys\nrank = os.environ['RANK']\n"
        "for number in range(50000):\n    sys.stdout.write(f'{rank} line {number}\\n')\nsys.stdout.write('the end')\n"
    )
    result = hosts.train(
        "--hosts", "n1:1,n2:1,n3:1", "--device", "cpu", script, env={"PYTHONUNBUFFERED": ""}
    )
    assert result.returncode == 0, result.stderr
    for rank in range(3):
        whole = "".join(f"{rank} line {number}\n" for number in range(50000)) + "the end"
        assert (result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text() == whole
        shown = [
            line.partition("] ")[2]
            for line in result.stdout.splitlines()
            if line.startswith(f"[{rank}]")
        ]
        assert [line for line in shown if "line" in line] == whole.splitlines()[:-1]


def test_stdin_goes_to_rank_0_wherever_that_is(hosts):
    data = os.urandom(3_000_000).hex().encode()
    source = hosts.work / "data"
    source.write_bytes(data)
    with source.open("rb") as file:
        result = hosts.train(
            "--hosts", "n1:1,n2:1", "--device", "cpu", "--no-python", "sha256sum", stdin=file
        )
    import hashlib

    assert result.returncode == 0, result.stderr
    assert (result.run_dir / "attempt-0" / "rank-0.log").read_text().split()[0] == hashlib.sha256(
        data
    ).hexdigest()
    assert (result.run_dir / "attempt-0" / "rank-1.log").read_text().split()[0] == hashlib.sha256(
        b""
    ).hexdigest()


def test_output_is_filed_on_the_nodes_as_well(hosts):
    logs = f"{hosts.local}/logs"
    result = hosts.train(
        "--hosts", "n1:1,n2:1", "--device", "cpu", "--node-logs", logs, PRINTS_VARIABLES
    )
    assert len(reported(result)) == 2
    for rank, name in enumerate(("n1", "n2")):
        found = hosts.run(name, f"cat {logs}/*/attempt-0/rank-*.log").stdout
        assert found == (result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text()


def test_a_script_that_is_missing_on_a_host_is_reported_by_name(hosts):
    hosts.run("n1", f"cp {PRINTS_VARIABLES} {hosts.local}/train.py")
    result = hosts.train(
        "--hosts", "n1:1,n2:1", "--device", "cpu", "--workdir", hosts.local, "train.py"
    )
    assert result.returncode == 69, result.stderr
    [row] = [line.split() for line in result.stderr.splitlines() if "there is no train.py" in line]
    assert row[:2] == ["n2", "script"]
    assert not result.of_type("workers_started")


def test_scripts_that_differ_between_hosts_are_refused(hosts):
    for name, text in (("n1", "pass"), ("n2", "pass  # other")):
        hosts.run(name, f"echo '{text}' > {hosts.local}/train.py")
    result = hosts.train("--hosts", "n1:1,n2:1", "--device", "cpu", f"{hosts.local}/train.py")
    assert result.returncode == 2, result.stderr
    assert "n1" in result.stderr
    assert "n2" in result.stderr
    assert not result.of_type("workers_started")
    hosts.assert_clean()


def test_two_jobs_on_the_same_hosts_do_not_touch_each_other(hosts):
    other = hosts.start(
        ["train", "--hosts", "n1:1,n2:1", "--device", "cpu", STAYS],
        env={"SIGN_DIR": str(hosts.work / "other")},
    )
    other.wait_stdout("all are here")
    sleeps = {("sleep", seconds) for seconds in ("1000", "1001", "1002")}
    until(
        lambda: all(
            sleeps <= {process.argv for process in hosts.processes(name)} for name in ("n1", "n2")
        ),
        "all that the workers start",
    )
    before = {name: {process.pid for process in hosts.processes(name)} for name in ("n1", "n2")}
    result = hosts.train(
        "--hosts",
        "n1:1,n2:1",
        "--device",
        "cpu",
        *SHORT,
        STAYS,
        "0=exit:3",
        env={"SIGN_DIR": str(hosts.work)},
    )
    assert result.returncode == 3
    assert {
        name: {process.pid for process in hosts.processes(name)} for name in ("n1", "n2")
    } == before
    other.send_signal(signal.SIGTERM)
    assert other.wait().returncode == 143
    hosts.assert_clean()


def test_nothing_secret_is_in_an_argument_list_on_any_host(hosts):
    secret = "s3cr3t-" + os.urandom(8).hex()
    args = ["train", "--hosts", "n1:1,n2:1", "--device", "cpu", "--env", "API_TOKEN", *SHORT, STAYS]
    running = hosts.start(args, env={"SIGN_DIR": str(hosts.work), "API_TOKEN": secret})
    running.wait_stdout("all are here")
    seen = [process for name in hosts.layout for process in hosts.everything(name)]
    assert len(seen) > 6
    assert not [process for process in seen if secret in " ".join(process.argv)]
    assert secret not in "".join(path.read_text() for path in running.run_dir.glob("*.json*"))
    running.send_signal(signal.SIGTERM)
    running.wait()
    assert oct(running.run_dir.stat().st_mode)[-3:] == "700"


def test_a_hang_on_one_host_is_found(hosts):
    script = hosts.work / "hangs.py"
    script.write_text(
        "import os, sys, time\nprint('started', flush=True)\n"
        "def the_place():\n    time.sleep(1000)\nif os.environ['RANK'] != '1':\n    the_place()\ntime.sleep(1001)\n"
    )
    result = hosts.train(
        "--hosts", "n1:1,n2:1,n3:1", "--device", "cpu", *SHORT, "--hang-timeout", "2", script
    )
    assert result.returncode == 124, result.stderr
    assert "the_place" in result.stderr
    hosts.assert_clean()


@pytest.mark.parametrize("how", ["lock", "loop", "stop"])
def test_each_kind_of_hang_on_a_host_is_distinguished_from_work(hosts, how):
    options = ("--hosts", "n1:1,n2:1,n3:1", "--device", "cpu", *SHORT, "--hang-timeout", "2")
    result = hosts.train(*options, PROGRAMS.parent / "hangs.py", how)
    assert result.returncode == 124, result.stderr
    [hang] = result.of_type("hang")
    assert hang["behind"] == [1]
    seen = [
        event for event in result.of_type("hang_postponed") if "in stuck" in (event["frame"] or "")
    ]
    assert bool(seen) is (how == "loop")
    hosts.assert_clean()


def test_a_host_whose_worker_computes_in_silence_is_no_hang(hosts):
    options = ("--hosts", "n1:1,n2:1,n3:1", "--device", "cpu", *SHORT, "--hang-timeout", "2")
    running = hosts.start(["train", *options, PROGRAMS.parent / "hangs.py", "work"])
    running.wait_for(
        lambda: any(
            "in stuck" in (event["frame"] or "")
            for event in running.events
            if event["type"] == "hang_postponed"
        ),
        "verdict that was postponed for rank 1",
    )
    (hosts.work / "enough").touch()
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert result.of_type("hang") == []
    hosts.assert_clean()


def test_a_silent_job_on_hosts_is_reported_once_and_ctrl_c_shows_the_stack_of_each_rank(hosts):
    options = ("--hosts", "n1:1,n2:1,n3:1", "--device", "cpu", *SHORT, "--hang-notice", "4")
    running = hosts.start(["train", *options, PROGRAMS.parent / "hangs.py", "lock"])
    assert running.wait_event("silence")["behind"] == [1]
    running.wait_stderr("The job goes on. --hang-timeout ends jobs that hang\n")
    running.send_signal(signal.SIGINT)
    result = running.wait()
    assert result.returncode == 130, result.stderr
    reported = result.stderr.partition("where the workers stood, ")[2]
    assert "rank 1 on n2:\n" in reported
    assert "in stuck" in reported
    assert "in others_wait" in reported
    hosts.assert_clean()


def test_warm_workers_on_hosts(hosts):
    result = hosts.train(
        "--hosts", "n1:2,n2:2", "--device", "cpu", "--preload", "json,decimal", PRINTS_VARIABLES
    )
    assert [each["host"] for each in reported(result)] == ["n1", "n1", "n2", "n2"]
    [*ended] = result.of_type("preload")
    assert [event["problem"] for event in ended] == [None, None]
    hosts.assert_clean()


# --- networks


@pytest.mark.parametrize(
    "options",
    [
        ("--own-name-is-loopback=n1,n2",),
        ("--networks=2", "--docker"),
        ("--ipv6-only",),
        ("--no-names",),
    ],
    ids=["127.0.1.1", "two networks", "IPv6 only", "no names"],
)
def test_gloo_connects_on_any_network(make_hosts, options):
    hosts = make_hosts(2, *options)
    script = hosts.work / "sum.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ntensor = torch.ones(1)\n"
        "dist.all_reduce(tensor)\nprint('sum', int(tensor.item()), flush=True)\ndist.destroy_process_group()\n"
    )
    words = ("--hosts", "n1:1,n2:1", "--device", "cpu", script)
    result = hosts.train(*words, timeout=120, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert [result.lines_of(rank)[-1] for rank in range(2)] == ["sum 2"] * 2


def test_an_interface_can_be_chosen(make_hosts):
    hosts = make_hosts(2, "--networks=2")
    for network in (0, 1):
        address = hosts.address("n1", network)
        cidr = ".".join(address.split(".")[:3]) + ".0/24"
        result = hosts.train(
            "--hosts", "n1:1,n2:1", "--device", "cpu", "--interface", cidr, PRINTS_VARIABLES
        )
        assert {each["MASTER_ADDR"] for each in reported(result)} == {address}


def test_nodes_that_cannot_reach_each_other_are_named(hosts):
    for name in ("n1", "n2"):
        faults.isolate(hosts, name)
    result = hosts.train("--hosts", "n1:1,n2:1,n3:1", "--device", "cpu", PRINTS_VARIABLES)
    assert result.returncode == 69
    assert "n2" in result.stderr
    assert "--interface" in result.stderr
    assert not result.of_type("workers_started")
    faults.isolate(hosts, "n1", on=False)
    faults.isolate(hosts, "n2", on=False)
    hosts.assert_clean()


def test_the_launchers_machine_needs_no_script(hosts):
    for name in ("n1", "n2"):
        hosts.run(
            name,
            f"mkdir {hosts.local}/project && cp {PRINTS_VARIABLES} {hosts.local}/project/train.py",
        )
    workdir = f"{hosts.local}/project"
    result = hosts.train(
        "--hosts", "n1:1,n2:1", "--device", "cpu", "--workdir", workdir, "train.py"
    )
    assert {each["cwd"] for each in reported(result)} == {workdir}
    assert hosts.run(HEAD, f"ls {workdir}", check=False).returncode


def test_a_low_limit_of_open_files_is_the_workers_and_costs_no_log(hosts):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))

    worker = ["--no-python", "sh", "-c", "ulimit -Sn; sleep 1"]
    words = ["train", "--hosts", "n1:1,n2:12", "--device", "cpu", *worker]
    job = hosts.start(words, host="n2", preexec_fn=limited)
    result = job.wait(60)
    assert result.returncode == 0, result.stderr
    reports = [
        (result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text() for rank in range(13)
    ]
    assert reports[1:] == ["128\n"] * 12
    assert reports[0]


def test_a_command_line_of_accelerate_launch_starts_all_hosts_of_a_list(hosts):
    (hosts.work / "a.yaml").write_text(
        "distributed_type: MULTI_CPU\nmixed_precision: bf16\nuse_cpu: true\n"
    )
    script = hosts.work / "process_state.py"
    script.write_text(
        "import os; print('told', os.environ['WORLD_SIZE'], os.environ['ACCELERATE_MIXED_PRECISION'])"
    )
    words = [
        "accelerate",
        "launch",
        "--config_file",
        str(hosts.work / "a.yaml"),
        "--hosts",
        "n1:1,n2:1",
        *SHORT,
    ]
    result = hosts.start([*words, str(script)]).wait()
    assert result.returncode == 0, result.stderr
    assert [(result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text() for rank in (0, 1)] == [
        "told 2 bf16\n"
    ] * 2
