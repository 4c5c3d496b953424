"""``distlaunch torchrun`` as a user runs it: torchrun's output and files, our exit codes and
reports."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys

import pytest

from tests.facts import mentions
from tests.process.conftest import until

TELLS = """
import os, sys
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"out {rank}.{attempt}")
print(f"err {rank}.{attempt}", file=sys.stderr)
"""


@pytest.fixture
def torchrun(distlaunch):
    """Run ``distlaunch torchrun`` with these arguments, and a script of this ``source``."""

    def run(*words: str, source: str = TELLS, script_args: tuple[str, ...] = (), **kwargs):
        (distlaunch.work / "train.py").write_text(source)
        return distlaunch.run(["torchrun", *words, "train.py", *script_args], **kwargs)

    return run


def files_of(run_dir) -> dict[str, str]:
    return {
        str(path.relative_to(run_dir)): path.read_text(errors="replace")
        for path in run_dir.rglob("*")
        if path.is_file()
    }


def test_output_has_no_prefix_and_nothing_of_ours(torchrun):
    result = torchrun("--standalone", "--nproc_per_node=2")
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["out 0.0", "out 1.0"]
    assert sorted(result.stderr.splitlines()) == ["err 0.0", "err 1.0"]


def test_the_same_line_of_many_ranks_is_shown_as_often_as_it_came(torchrun):
    result = torchrun("--nproc-per-node=4", source="print('same')")
    assert result.stdout == "same\n" * 4


def test_every_byte_is_filed_in_torchruns_layout_with_the_run_id_in_front(torchrun, distlaunch):
    result = torchrun("--nproc-per-node=2", "--log-dir", "logs", "--rdzv-id", "run/7 é")
    assert result.run_dir.parent == distlaunch.work / "logs"
    name, _, token = result.run_dir.name.rpartition("_")
    assert (name, len(token)) == ("run-7-é", 8)
    files = files_of(result.run_dir)
    assert {name: text for name, text in files.items() if name.startswith("attempt")} == {
        f"attempt_0/{rank}/std{stream}.log": f"{stream} {rank}.0\n"
        for rank in (0, 1)
        for stream in ("out", "err")
    }
    assert files.keys() >= {"events.jsonl", "plan-0.json", ".distlaunch-run"}
    plan = json.loads(files["plan-0.json"])
    assert plan["env"]["TORCHELASTIC_RUN_ID"] == "run/7 é"
    worker = plan["nodes"][0]["workers"][1]["env"]
    assert worker["TORCHELASTIC_ERROR_FILE"] == str(
        result.run_dir / "attempt_0" / "1" / "error.json"
    )


def test_two_runs_of_one_id_have_a_folder_each(torchrun, distlaunch):
    for _ in range(2):
        torchrun("--log-dir", "logs", "--rdzv-id", "same")
    assert len(list((distlaunch.work / "logs").glob("same_*"))) == 2


def test_tee_shows_whole_lines_with_torchruns_prefix_and_redirects_show_nothing(torchrun):
    result = torchrun("--nproc-per-node=2", "--tee", "1", "-r", "0:2", "--role", "trainer")
    assert sorted(result.stdout.splitlines()) == ["[trainer0]:out 0.0", "[trainer1]:out 1.0"]
    assert result.stderr.splitlines() == ["err 1.0"]
    assert files_of(result.run_dir)["attempt_0/0/stderr.log"] == "err 0.0\n"


def test_ranks_that_are_filtered_out_are_filed_only(torchrun):
    result = torchrun("--nproc-per-node=2", "--local_ranks_filter=1")
    assert (result.stdout, result.stderr) == ("out 1.0\n", "err 1.0\n")
    assert files_of(result.run_dir)["attempt_0/0/stdout.log"] == "out 0.0\n"


def test_lines_that_match_are_copied_with_their_prefix(torchrun):
    source = "print('a, b'); print('other'); print('a, b again', end='')"
    result = torchrun(
        "--nproc-per-node=2", "-t", "3", "--duplicate-stdout-filters", "a,, b,zzz", source=source
    )
    lines = files_of(result.run_dir)["attempt_0/filtered_stdout.log"].splitlines()
    assert sorted(lines) == [
        f"[default{rank}]:a, b{more}" for rank in (0, 1) for more in ("", " again")
    ]


def test_a_failed_job_exits_with_the_workers_code_and_a_report(torchrun):
    source = TELLS + "import time\nif rank == '1': sys.exit(37)\ntime.sleep(60)"
    result = torchrun("--nproc-per-node=2", source=source)
    assert result.returncode == 37
    assert "rank 1 of 2 failed: exit code 37" in result.stderr
    assert str(result.run_dir / "attempt_0" / "1" / "stderr.log") in result.stderr.replace(
        "\n    ", ""
    )
    assert (result.run_dir / "report.txt").exists()


def test_a_restart_has_a_folder_of_its_own(torchrun):
    source = TELLS + "sys.exit(3 if attempt == '0' else 0)"
    result = torchrun("--nproc-per-node=2", "--max-restarts=1", source=source)
    assert result.returncode == 0
    assert files_of(result.run_dir)["attempt_1/1/stdout.log"] == "out 1.1\n"


def test_a_failure_is_retried_as_often_as_torchrun_does_where_that_is_wanted(torchrun):
    source = TELLS + "raise ValueError('again')"
    words = ["--nproc-per-node=1", "--max-restarts=2"]
    assert len(torchrun(*words, source=source).of_type("attempt_started")) == 2, (
        "the same failure twice is enough"
    )
    result = torchrun(*words, source=source, env={"DISTLAUNCH_MIN_UPTIME": "0"})
    assert len(result.of_type("attempt_started")) >= 3


def test_words_after_the_script_reach_it_byte_for_byte(torchrun):
    source = "import sys; print(sys.argv[1:])"
    words = ("--r=16", "-m", "--", "--nnodes", "9", "", "a b", "Ü", "$$")
    assert torchrun(source=source, script_args=words).stdout == f"{list(words)}\n"


ARGUMENTS = "import sys; print(sys.argv[1:])"


def test_one_pair_of_dashes_directly_behind_the_script_is_dropped_as_torchrun_does(torchrun):
    assert torchrun(source=ARGUMENTS, script_args=("--", "--lr", "1")).stdout == "['--lr', '1']\n"
    assert torchrun(source=ARGUMENTS, script_args=("--", "--", "x")).stdout == "['--', 'x']\n"
    assert (
        torchrun(source=ARGUMENTS, script_args=("--a", "--", "--b")).stdout
        == "['--a', '--', '--b']\n"
    )


@pytest.mark.parametrize(
    "words",
    [("accelerate", "launch", "--cpu", "--quiet"), ("deepspeed", "--no_local_rank", "--quiet")],
    ids=" ".join,
)
def test_so_do_the_commands_for_accelerate_and_deepspeed(distlaunch, words):
    distlaunch.pretend("deepspeed", "accelerate")
    (distlaunch.work / "a.py").write_text(ARGUMENTS)
    for given, got in (
        (["--", "--lr"], ["--lr"]),
        (["--", "--", "x"], ["--", "x"]),
        (["-a", "--", "b"], None),
    ):
        result = distlaunch.run([*words, "a.py", *given])
        assert result.returncode == 0, result.stderr
        assert result.lines_of(0) == [str(given if got is None else got)]


def test_train_passes_dashes_on_and_a_script_that_refuses_them_gets_a_hint(distlaunch):
    source = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"
    (distlaunch.work / "a.py").write_text(source)
    result = distlaunch.train("a.py", "--", "--lr", "1")
    assert result.returncode == 2
    report = " ".join((result.run_dir / "report.txt").read_text().split())
    assert mentions(report, "hint", "`--` behind SCRIPT")
    (distlaunch.work / "b.py").write_text(ARGUMENTS)
    assert distlaunch.train("b.py", "--", "--lr").lines_of(0) == ["['--', '--lr']"]


LOCAL_RANKS = """
import os, sys
os.write(1, f"{os.environ['LOCAL_RANK']} {sys.argv[1:]}\\n".encode())  # in one write: workers of torch share stdout
"""


def test_under_torch_distributed_launch_scripts_get_their_local_rank_unless_use_env_is_given(
    distlaunch,
):
    (distlaunch.work / "a.py").write_text(LOCAL_RANKS)
    launch = ["torch.distributed.launch", "--nproc_per_node=2"]
    result = distlaunch.run([*launch, "a.py", "--lr", "1"])
    expected = [f"{rank} ['--local-rank={rank}', '--lr', '1']" for rank in (0, 1)]
    assert sorted(result.stdout.splitlines()) == expected, result.stderr
    result = distlaunch.run([*launch, "--use_env", "a.py", "--", "--lr"])
    assert sorted(result.stdout.splitlines()) == ["0 ['--lr']", "1 ['--lr']"]
    result = distlaunch.run(["torchrun", "--use_env", "a.py"])
    assert (result.stdout, result.stderr) == ("0 []\n", "")


def test_a_script_without_local_rank_is_given_a_hint_how_torch_distributed_launch_leaves_it_out(
    distlaunch,
):
    (distlaunch.work / "a.py").write_text(
        "import argparse\nargparse.ArgumentParser().parse_args()\n"
    )
    result = distlaunch.run(["torch.distributed.launch", "a.py"])
    assert result.returncode == 2
    assert mentions(result.stderr, "hint", "--use-env", "LOCAL_RANK")


def test_torch_distributed_launch_gives_scripts_the_arguments_that_torchs_own_gives(distlaunch):
    (distlaunch.work / "a.py").write_text(LOCAL_RANKS)
    words = ["--nproc_per_node=2", "a.py", "--lr", "1"]
    own = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", *words],
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=120,
    )
    ours = distlaunch.run(["torch.distributed.launch", *words])
    assert sorted(own.stdout.splitlines()) == sorted(ours.stdout.splitlines()) != []


@pytest.mark.parametrize(
    ("name", "words", "page"),
    [
        ("accelerate-launch", ["--help"], "Usage: distlaunch accelerate launch"),
        ("ds", ["--help"], "Usage: distlaunch deepspeed"),
        ("deepspeed.pt", ["--help"], "Usage: distlaunch deepspeed"),
        ("torch.distributed.launch", ["--help"], "Usage: distlaunch torch.distributed.launch"),
    ],
)
def test_a_link_with_another_launchers_name_stands_for_its_command(
    distlaunch, tmp_path, name, words, page
):
    link = tmp_path / name
    link.write_text(
        f"#!{sys.executable}\nimport sys\nfrom distlaunch.__main__ import main\nsys.argv[0] = {str(link)!r}\nmain()\n"
    )
    link.chmod(0o755)
    done = subprocess.run(
        [link, *words], env=distlaunch.env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(page), done.stderr


@pytest.fixture
def other_environment(tmp_path):
    """Return the folder of a virtual environment in which there is a module onlythere."""
    folder = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "onlythere.py").touch()
    return folder


@pytest.mark.parametrize(
    ("command", "option"),
    [(["torchrun"], "PYTHON_EXEC="), (["train", "--num-procs", "1"], "--python=")],
    ids=str,
)
def test_another_active_environment_is_named_and_whether_it_has_the_missing_module(
    distlaunch, other_environment, command, option
):
    python = f"{option}{other_environment}/bin/python"
    for module, shown in (
        ("onlythere", f"The active environment has onlythere: {python}"),
        ("nowhere.x", f"The active environment ({other_environment}) has no nowhere either"),
    ):
        (distlaunch.work / "train.py").write_text(f"import {module}\n")
        result = distlaunch.run([*command, "train.py"], env={"VIRTUAL_ENV": str(other_environment)})
        words = "".join(result.stderr.split())
        assert (
            f"workers run {sys.executable}, not that of the active environment; to use that: {python}".replace(
                " ", ""
            )
            in words
        )
        assert shown.replace(" ", "") in words
    quiet = {"VIRTUAL_ENV": str(other_environment), "DISTLAUNCH_QUIET": "1"}
    result = distlaunch.run([*command, "train.py"], env=quiet)
    # The report's hint names the environment, wherever its lines break.
    assert "notthatoftheactiveenvironment" not in "".join(result.stderr.split())


def test_the_local_rank_in_the_arguments_is_each_workers(torchrun):
    result = torchrun(
        "--nproc-per-node=2",
        source="import sys; print(sys.argv[1])",
        script_args=("gpu-${local_rank}",),
    )
    assert sorted(result.stdout.split()) == ["gpu-0", "gpu-1"]


def test_pet_variables_are_defaults_and_do_not_reach_workers(torchrun):
    source = "import os; print(os.environ['WORLD_SIZE'], [name for name in os.environ if name.startswith('PET_')])"
    result = torchrun(source=source, env={"PET_NPROC_PER_NODE": "2", "PET_STANDALONE": "true"})
    assert result.stdout == "2 []\n" * 2


def test_devices_stay_as_they_are(torchrun):
    source = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['LOCAL_RANK'])"
    assert torchrun(source=source).stdout == "None 0\n"
    result = torchrun("--nproc-per-node=2", source=source, env={"CUDA_VISIBLE_DEVICES": "4,6"})
    assert sorted(result.stdout.splitlines()) == ["4,6 0", "4,6 1"]


def test_rank_0_has_the_launchers_stdin_and_the_others_none(torchrun, distlaunch):
    source = "import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))"
    (distlaunch.work / "in").write_text("hello")
    with (distlaunch.work / "in").open() as file:
        result = torchrun("--nproc-per-node=2", source=source, stdin=file)
    assert sorted(result.stdout.splitlines()) == ["0 'hello'", "1 ''"]


def test_a_port_that_is_given_is_rank_0s_and_one_in_use_is_refused(torchrun):
    source = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        taken.listen()
        result = torchrun("--master-addr", "localhost", "--master-port", port, source=source)
    assert result.returncode == 2
    assert mentions(result.stderr, f"port {port}", "in use")
    assert (
        torchrun("--master-addr", "localhost", "--master-port", port, source=source).stdout
        == f"localhost {port}\n"
    )


def test_options_without_effect_are_reported_once_and_variables_are_not(torchrun):
    result = torchrun(
        "--nproc-per-node=2", "--monitor-interval=5", "--rdzv-conf", "timeout=9", "-t", "5:3"
    )
    shown = [line for line in result.stderr.splitlines() if line.startswith("distlaunch:")]
    assert len(shown) == 2
    assert mentions(shown[0], "without effect", "--rdzv-conf", "--monitor-interval")
    assert mentions(shown[1], "--tee", "rank 5")
    quiet = torchrun("--monitor-interval=5", env={"DISTLAUNCH_QUIET": "1"})
    assert "distlaunch:" not in quiet.stderr
    assert "distlaunch:" not in torchrun(env={"PET_MONITOR_INTERVAL": "5"}).stderr


def test_our_own_variables_work(torchrun):
    plain = torchrun(
        "--nproc-per-node=2", source="print('same')", env={"DISTLAUNCH_FORMAT": "plain"}
    )
    assert plain.stdout in {"[0-1] same\n", "[0] same\n[1] same\n", "[1] same\n[0] same\n"}
    assert "distlaunch: job " in torchrun(env={"DISTLAUNCH_QUIET": "0"}).stderr
    warm = torchrun(
        "--nproc-per-node=2",
        env={"DISTLAUNCH_PRELOAD": "json"},
        source="import sys; print('json' in sys.modules)",
    )
    assert warm.stdout == "True\n" * 2, warm.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes=2", "x.py"], "error: --nnodes 2: nothing says where the nodes meet"),
        (
            ["--nproc-per-node=gpu", "train.py"],
            "error: --nproc-per-node gpu: there is no GPU to use here",
        ),
        (["nothing.py"], "error: nothing.py: there is no such file"),
        (["--nproc-per-nod", "2"], "error: SCRIPT is missing"),
        (["--tee=9", "train.py"], "error: --tee takes 0 (neither)"),
    ],
    ids=str,
)
def test_an_impossible_request_is_one_line_and_exit_code_2(distlaunch, words, message):
    (distlaunch.work / "train.py").write_text("")
    result = distlaunch.run(["torchrun", *words], env={"NVIDIA_VISIBLE_DEVICES": "none"})
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    assert result.run_dir is None


def test_help_lists_the_options_without_the_command_line_framework(distlaunch):
    code = "import sys\nsys.argv = ['distlaunch', 'torchrun', '--help']\nimport distlaunch.__main__ as command\n"
    code += "try:\n    command.main()\nfinally:\n    print('MODULES', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=distlaunch.env, capture_output=True, text=True, timeout=60
    )
    text, _, modules = done.stdout.partition("MODULES")
    assert done.returncode == 0
    assert "--duplicate-stdout-filters TEXT,..." in text
    assert not {"typer", "click", "rich", "torch", "argparse"} & set(modules.split())


def test_a_job_loads_neither_typer_nor_torch(distlaunch):
    code = "import sys\nsys.argv = ['distlaunch', 'torchrun', '--nproc-per-node=2', '--no-python', '/bin/true']\n"
    code += "import distlaunch.__main__ as command\ntry:\n    command.main()\nfinally:\n    print('MODULES', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.partition("MODULES")[2].split())
    assert "distlaunch.cli.compat.torchrun.command" in modules
    assert (
        not {
            "typer",
            "click",
            "rich",
            "torch",
            "argparse",
            "asyncio",
            "string",
            "difflib",
            "textwrap",
        }
        & modules
    )
    assert "distlaunch.core.probe.gpus" not in modules, "nobody asked which GPUs there are"


@pytest.mark.parametrize(
    ("signum", "shown"),
    [(signal.SIGTERM, ""), (signal.SIGINT, "SIGINT: asking 2 workers to end, within 30 s")],
)
def test_a_signal_stops_the_job_in_order_and_ctrl_c_gets_a_notice(distlaunch, signum, shown):
    (distlaunch.work / "train.py").write_text(
        f"import signal, sys\nsignal.signal({signum:d}, lambda *_: sys.exit(print('saved', file=sys.stderr)))\nprint('up')\nsignal.pause()\n"
    )
    running = distlaunch.start(["torchrun", "--nproc-per-node=2", "train.py"])
    running.wait_for(lambda: running.stdout == "up\n" * 2, "both workers")
    running.send_signal(signum)
    result = running.wait()
    assert result.returncode == 128 + signum
    assert result.stderr.count("saved") == 2
    ours = [line for line in result.stderr.splitlines() if line.startswith("distlaunch: ")]
    assert [line.removeprefix("distlaunch: ").startswith(shown) for line in ours] == [True] * bool(
        shown
    )


def test_one_worker_has_the_terminal(distlaunch):
    (distlaunch.work / "train.py").write_text(
        "import sys; print(input('name? '), sys.stdout.isatty())"
    )
    master, slave = pty.openpty()
    running = distlaunch.start(
        ["torchrun", "train.py"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=_own_the_terminal,
    )
    os.close(slave)
    seen = b""
    while b"name? " not in seen:
        seen += os.read(master, 4096)
    os.write(master, b"Ada\r")
    while b"Ada True" not in seen:
        seen += os.read(master, 4096)
    assert running.process.wait(30) == 0
    os.close(master)


def _own_the_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_old_runs_in_torchruns_layout_are_pruned_from_the_default_place(torchrun, distlaunch):
    first = torchrun("--nproc-per-node=2", "-t", "1", "--duplicate-stdout-filters=out").run_dir
    os.utime(first / "events.jsonl", (1, 1))
    os.utime(first, (1, 1))
    for index in range(50):
        old = distlaunch.jobs / f"old-{index:02}"
        (old / "attempt-0").mkdir(parents=True)
        (old / ".distlaunch-run").touch()
        os.utime(old, (1000 + index, 1000 + index))
    (distlaunch.work / "train.py").write_text("import time; time.sleep(0.5)")
    distlaunch.run(["torchrun", "train.py"])
    until(lambda: not first.exists(), "the oldest run is removed")


def test_a_file_of_somebody_else_in_a_runs_folder_keeps_it(torchrun, distlaunch):
    first = torchrun().run_dir
    (first / "attempt_0" / "0" / "mine.txt").write_text("keep")
    os.utime(first / "events.jsonl", (1, 1))
    os.utime(first, (1, 1))
    for index in range(50):
        (distlaunch.jobs / f"old-{index:02}").mkdir()
        (distlaunch.jobs / f"old-{index:02}" / ".distlaunch-run").touch()
    torchrun()
    assert (first / "attempt_0" / "0" / "mine.txt").read_text() == "keep"


def test_a_link_that_is_named_torchrun_is_this_command(distlaunch):
    (distlaunch.work / "train.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    program = distlaunch.tmp_path / "distlaunch"
    program.write_text(f"#!{sys.executable}\nfrom distlaunch.__main__ import main\nmain()\n")
    program.chmod(0o700)
    (distlaunch.tmp_path / "torchrun").symlink_to(program)
    env = {**distlaunch.env, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [
        str(distlaunch.tmp_path / "torchrun"),
        "--standalone",
        "--nproc_per_node=2",
        "train.py",
    ]
    done = subprocess.run(
        words, cwd=distlaunch.work, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2\n" * 2), done.stderr


def test_only_the_user_can_read_the_files_of_a_job(torchrun):
    run_dir = torchrun("--nproc-per-node=2", "--log-dir", "logs").run_dir
    for path in [run_dir, *run_dir.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_variables_that_only_train_reads_are_warned_of_once(torchrun):
    result = torchrun(env={"DISTLAUNCH_MAX_RESTARTS": "3", "DISTLAUNCH_NUM_PROCS": "3"})
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("distlaunch:")]
    assert "DISTLAUNCH_MAX_RESTARTS (here: --max-restarts or PET_MAX_RESTARTS)" in line
    assert mentions(line, "DISTLAUNCH_NUM_PROCS", "--nproc-per-node", "PET_NPROC_PER_NODE")


def test_errors_and_hints_speak_torchruns_words(torchrun):
    refused = torchrun(env={"DISTLAUNCH_PRELOAD": "json", "PYTHON_EXEC": sys.executable})
    assert mentions(refused.stderr, "DISTLAUNCH_PRELOAD", "PYTHON_EXEC", "exclude")
    missing = torchrun(source="import nothing_of_this_name", env={"PYTHON_EXEC": sys.executable})
    assert mentions(missing.stderr.replace("\n    ", " "), "PYTHON_EXEC")
    asks = torchrun("--nproc-per-node=2", source="input()")
    assert "--nproc-per-node 1" in asks.stderr.replace("\n    ", " ")
