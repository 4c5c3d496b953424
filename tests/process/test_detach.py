"""``train --detach``: what the command returns, what goes on, and ``attach`` and ``wait`` on it."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys

import pytest

from distlaunch.core.protocol import control_messages
from distlaunch.jobs import control
from tests.facts import mentions
from tests.launcher import PROGRAMS
from tests.ports import free_port
from tests.process.conftest import is_alive, until
from tests.process.terminal.conftest import Screen

LONG_S = 60.0
PROGRAM = PROGRAMS / "prints_and_waits.py"


@pytest.fixture
def detached(distlaunch):
    """Start a job with --detach, whose workers print lines and wait for a sign."""

    def start(*words, args=("3",), **options):
        train = ["train", "--detach", "--num-procs", "2", *words, PROGRAM, *args]
        result = distlaunch.run(train, LONG_S, **options)
        assert result.returncode == 0, result.stderr
        return Detached(distlaunch, result)

    return start


class Detached:
    """A job in the background."""

    def __init__(self, distlaunch, result) -> None:
        self.result = result
        [self.name] = result.stdout.splitlines()
        self.run_dir = distlaunch.jobs / self.name
        self._distlaunch = distlaunch

    @property
    def launcher(self) -> int:
        return int((self.run_dir / "launcher.pid").read_text())

    @property
    def console(self) -> str:
        return (self.run_dir / "console.log").read_text()

    def go(self, name: str = "go") -> None:
        (self._distlaunch.work / name).touch()

    def wait(self) -> int:
        return self._distlaunch.run(["wait", self.name], LONG_S).returncode

    def wait_printed(self) -> None:
        until(
            lambda: all((self._distlaunch.work / f"printed-0-{rank}").exists() for rank in (0, 1)),
            "lines of both ranks",
            within_s=LONG_S,
        )


def test_the_command_returns_while_the_workers_run_and_prints_the_name_alone(detached):
    job = detached()
    events = (job.run_dir / "events.jsonl").read_text()
    assert '"workers_started"' in events
    assert '"job_ended"' not in events
    assert is_alive(job.launcher)
    assert job.name in job.result.stderr
    job.go()
    assert job.wait() == 0


def test_the_launcher_has_a_session_of_its_own_no_stdin_and_its_console_in_a_file(detached):
    job = detached()
    pid = job.launcher
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    console = str(job.run_dir / "console.log")
    assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)] == [console, console]
    assert stat.S_IMODE(os.stat(console).st_mode) == 0o600
    job.wait_printed()
    job.go()
    assert job.wait() == 0
    assert all(f"[{rank}] attempt 0 rank {rank} ends" in job.console for rank in (0, 1))


def test_wait_returns_the_code_of_a_job_that_fails_later(detached):
    job = detached(args=("1", "7"))
    job.go()
    assert job.wait() == 7
    assert (job.run_dir / "report.txt").read_text().splitlines()[0] in job.console


def test_a_wrong_plan_is_an_error_at_once(distlaunch):
    result = distlaunch.train("--detach", "--num-procs", "2", "missing.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert mentions(result.stderr, "error", "missing.py")
    assert result.run_dir is None


def test_a_start_that_fails_gives_the_report_and_its_exit_code(distlaunch):
    (distlaunch.work / "train.py").touch()
    words = ["--hosts", "no-such-host.invalid:1", "--join-timeout", "2"]
    result = distlaunch.train("--detach", "--device", "cpu", *words, "train.py", timeout=LONG_S)
    assert (result.returncode, result.stdout) == (69, "")
    assert mentions(result.stderr, "no-such-host.invalid")
    assert distlaunch.run(["ps"]).stdout == ""


def test_preloaded_workers_have_been_forked_when_the_command_returns(distlaunch, detached):
    job = detached("--preload", "json")
    assert '"workers_started"' in (job.run_dir / "events.jsonl").read_text()
    job.go()
    assert job.wait() == 0


def start_with_slow_import(distlaunch, folder, wait):
    """Start a job in the background. Return when it imports a module that runs ``wait``."""
    (folder / "slow_import.py").write_text(
        f"import pathlib, time\npathlib.Path('importing').touch()\n{wait}\n"
    )
    running = distlaunch.start(
        ["train", "--detach", "--num-procs", "1", "--preload", "slow_import", PROGRAM, "1"],
        env={"PYTHONPATH": str(folder)},
    )
    until((distlaunch.work / "importing").exists, "the import", within_s=LONG_S)
    return running


def test_a_signal_during_the_start_stops_the_job(distlaunch, tmp_path):
    running = start_with_slow_import(distlaunch, tmp_path, "time.sleep(600)")
    running.send_signal(signal.SIGINT)
    assert running.wait(LONG_S).returncode == 130
    assert distlaunch.run(["ps"]).stdout == ""


def test_the_job_starts_although_the_command_is_killed_meanwhile(distlaunch, tmp_path):
    running = start_with_slow_import(
        distlaunch, tmp_path, "while not pathlib.Path('imported').exists(): time.sleep(0.01)"
    )
    running.send_signal(signal.SIGKILL)
    assert running.wait(LONG_S).returncode == -signal.SIGKILL
    for name in ("imported", "go"):
        (distlaunch.work / name).touch()
    assert distlaunch.run(["wait", "latest"], LONG_S).returncode == 0
    assert (distlaunch.work / "printed-0-0").exists()


def test_one_launcher_per_node_cannot_detach(distlaunch):
    words = ["--rendezvous", f"127.0.0.1:{free_port()}", "--node-rank", "0", "--num-nodes", "2"]
    result = distlaunch.train("--detach", "--procs-per-node", "1", *words, PROGRAM, "1")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--detach" in result.stderr
    assert mentions(result.stderr, "each node has a launcher")


def test_the_first_process_of_a_container_cannot_detach(distlaunch):
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    container = ["unshare", "--pid", "--fork", "--mount-proc", *as_root, sys.executable]
    done = subprocess.run(
        [*container, "-m", "distlaunch", "train", "--detach", "--num-procs", "1", PROGRAM, "1"],
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert mentions(done.stderr, "error", "container")


def test_the_job_goes_on_when_its_terminal_is_closed(distlaunch):
    screen = Screen()
    command = f'"{sys.executable}" -m distlaunch train --detach --num-procs 2 {PROGRAM} 2 >name; exec sleep 600'
    try:
        shell = subprocess.Popen(
            ["sh", "-c", command], env=distlaunch.env, cwd=distlaunch.work, **screen.streams()
        )
        until(
            lambda: (distlaunch.work / "name").exists() and (distlaunch.work / "name").read_text(),
            "the name of the job",
            within_s=LONG_S,
        )
    finally:
        screen.close()
    assert shell.wait(LONG_S) == -signal.SIGHUP
    name = (distlaunch.work / "name").read_text().strip()
    assert distlaunch.run(["status", name]).stdout
    (distlaunch.work / "go").touch()
    assert distlaunch.run(["wait", name], LONG_S).returncode == 0


def test_two_jobs_of_one_id_have_names_of_their_own(distlaunch, detached):
    first, second = detached("--job-id", "exp"), detached("--job-id", "exp")
    assert (first.name, second.name) == ("exp", "exp-2")
    assert distlaunch.run(["stop", second.name], LONG_S).returncode == 0
    assert is_alive(first.launcher)
    first.go()
    assert distlaunch.run(["wait", first.run_dir], LONG_S).returncode == 0
    assert second.wait() == 143


def test_only_train_can_detach(distlaunch):
    result = distlaunch.run(["torchrun", "--detach", "--nproc-per-node", "1", PROGRAM, "1"])
    assert result.returncode == 2
    assert "--detach" in result.stderr


# --- attach


def test_attach_shows_the_last_screenful_and_then_what_comes(distlaunch, detached):
    job = detached(args=("100", "3"))
    until(lambda: job.console.count("line 99") == 2, "all lines", within_s=LONG_S)
    attached = distlaunch.start(["attach", job.name])
    attached.wait_stdout("line 99")
    assert "line 10\n" not in attached.stdout
    job.go()
    result = attached.wait(LONG_S)
    assert result.returncode == 3
    assert job.console.endswith(result.stdout)
    assert mentions(result.stderr, "exit code 3")


def test_attach_shows_the_end_of_the_console_after_the_job(distlaunch, detached):
    job = detached()
    job.go()
    assert job.wait() == 0
    result = distlaunch.run(["attach", "latest"])
    assert result.returncode == 0
    assert result.stdout == job.console


def test_attach_to_a_job_in_a_terminal_names_the_command_for_it(distlaunch):
    (distlaunch.work / "go").touch()
    assert distlaunch.train("--num-procs", "1", PROGRAM, "1").returncode == 0
    result = distlaunch.run(["attach", "latest"])
    assert result.returncode == 2
    assert "--detach" in result.stderr
    assert mentions(result.stderr, "distlaunch logs", "--follow")


@pytest.fixture
def terminal():
    screen = Screen()
    yield screen
    screen.close()


def attach_on(screen: Screen, distlaunch, job: Detached):
    attached = distlaunch.start(["attach", job.name], **screen.streams())
    screen.wait_text("line 2")
    return attached


def test_attach_passes_no_harmful_sequences_to_a_terminal(distlaunch, terminal):
    line = "\x1b[2J\x1b]52;c;QQ==\x07\x1b[31mred\x1b[0m end"
    program = distlaunch.work / "harmful.py"
    program.write_text(f"print({line!r})\n")
    result = distlaunch.run(["train", "--detach", "--num-procs", "1", "harmful.py"], LONG_S)
    job = Detached(distlaunch, result)
    assert job.wait() == 0
    assert "\x1b[2J" in job.console
    attached = distlaunch.start(["attach", job.name], **terminal.streams())
    assert terminal.read_until_end(attached).returncode == 0
    seen = terminal.seen.decode()
    assert "\x1b[31mred" in seen
    assert "\x1b[2J" not in seen
    assert "\x1b]52" not in seen


def test_ctrl_c_and_d_detach(distlaunch, detached, terminal):
    job = detached()
    job.wait_printed()
    attached = attach_on(terminal, distlaunch, job)
    terminal.type("\x03")
    asked = terminal.wait_text("detach or stop?")
    terminal.type("d\n")
    assert terminal.read_until_end(attached).returncode == 0
    assert "attach" in terminal.seen[asked:].decode()
    assert is_alive(job.launcher)
    job.go()
    assert job.wait() == 0


def test_ctrl_c_and_enter_stay(distlaunch, detached, terminal):
    job = detached(args=("3", "4"))
    job.wait_printed()
    attached = attach_on(terminal, distlaunch, job)
    terminal.type("\x03")
    asked = terminal.wait_text("detach or stop?")
    terminal.type("\n")
    job.go()
    terminal.wait_text("ends", after=asked)
    assert terminal.read_until_end(attached).returncode == 4


def test_ctrl_c_and_s_stop_the_job(distlaunch, detached, terminal):
    job = detached()
    job.wait_printed()
    attached = attach_on(terminal, distlaunch, job)
    terminal.type("\x03")
    terminal.wait_text("detach or stop?")
    terminal.type("s\n")
    assert terminal.read_until_end(attached).returncode == 143
    assert "SIGTERM" in terminal.seen.decode()


def test_another_answer_is_asked_for_again(distlaunch, detached, terminal):
    job = detached()
    job.wait_printed()
    attached = attach_on(terminal, distlaunch, job)
    terminal.type("\x03")
    asked = terminal.wait_text("detach or stop?")
    terminal.type("yes\n")
    terminal.wait_text("not understood", after=asked)
    terminal.type("detach\n")
    assert terminal.read_until_end(attached).returncode == 0
    assert is_alive(job.launcher)
    job.go()
    assert job.wait() == 0


def test_ctrl_c_twice_detaches(distlaunch, detached, terminal):
    job = detached()
    job.wait_printed()
    attached = attach_on(terminal, distlaunch, job)
    terminal.type("\x03")
    terminal.wait_text("detach or stop?")
    terminal.type("\x03")
    assert terminal.read_until_end(attached).returncode == 0
    assert is_alive(job.launcher)
    assert distlaunch.run(["stop", job.name, "--now"], LONG_S).returncode == 0


# --- what ends it, and what does not


def test_a_launcher_that_is_killed_ends_attach_and_its_socket_is_removed(distlaunch, detached):
    job = detached()
    until(lambda: answers(job), "an answer", within_s=LONG_S)
    attached = distlaunch.start(["attach", job.name])
    attached.wait_stdout("rank")
    os.kill(job.launcher, signal.SIGKILL)
    assert attached.wait(LONG_S).returncode == 137
    assert job.wait() == 137
    with pytest.raises(control.NoControlError):
        control.ask(str(job.run_dir), "snapshot")
    name = control_messages.socket_name(str(job.run_dir))
    directories = control_messages.control_directories()
    assert not any(os.path.exists(os.path.join(each, name)) for each in directories)


def test_a_run_directory_that_vanishes_ends_attach_and_the_job_goes_on(distlaunch, detached):
    job = detached()
    pid = job.launcher
    attached = distlaunch.start(["attach", job.name])
    attached.wait_stdout("rank")
    shutil.rmtree(job.run_dir)
    assert attached.wait(LONG_S).returncode == 2
    assert is_alive(pid)
    job.go()
    until(lambda: not is_alive(pid), "the end of the launcher", within_s=LONG_S)


def answers(job: Detached, timeout_s: float = LONG_S):
    try:
        return control.ask(str(job.run_dir), "snapshot", timeout_s=timeout_s)
    except control.NoControlError:
        return None


def test_a_run_directory_with_a_long_path_has_a_socket_too(distlaunch, tmp_path):
    logs = tmp_path.joinpath(*["long" * 20] * 3)
    words = ["train", "--detach", "--num-procs", "1", "--log-dir", logs, PROGRAM, "1"]
    result = distlaunch.run(words, LONG_S)
    assert result.returncode == 0, result.stderr
    run_dir = logs / result.stdout.strip()

    def answer():
        try:
            return control.ask(str(run_dir), "snapshot", timeout_s=LONG_S)
        except control.NoControlError:
            return None

    snapshot = until(answer, "an answer", within_s=LONG_S)
    assert snapshot["run_dir"] == str(run_dir)
    assert distlaunch.run(["stop", result.stdout.strip(), "--now"], LONG_S).returncode == 0


FULL = """
mkdir -p "$1" && mount -t tmpfs -o size=512k tmpfs "$1" || exit 99
head -c 65536 /dev/zero > "$1/filler"
cd "$2" && shift 2
name=$("$@") || exit 98
"$DISTLAUNCH_PYTHON" -m distlaunch wait "$name"
"""
FILLS = """
import os, pathlib, sys, time
for number in range(20_000):
    print("x" * 100)
pathlib.Path(f"wrote-{os.environ['RANK']}").touch()
while not all(pathlib.Path(f"wrote-{rank}").exists() for rank in (0, 1)):
    time.sleep(0.01)
sys.exit(5)
"""


def test_a_full_disk_stops_the_console_and_not_the_job(distlaunch, tmp_path):
    (distlaunch.work / "fills.py").write_text(FILLS)
    disk = tmp_path / "disk"
    train = [sys.executable, "-m", "distlaunch", "train", "--detach", "--num-procs", "2"]
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare = ["unshare", "--mount", *as_root, "sh", "-c", FULL, "sh"]
    done = subprocess.run(
        [*unshare, disk, distlaunch.work, *train, "--log-dir", disk, "fills.py"],
        env={**distlaunch.env, "DISTLAUNCH_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (distlaunch.work / "wrote-0").exists(), done.stderr
    assert (distlaunch.work / "wrote-1").exists(), done.stderr
    assert done.returncode == 5, done.stderr


# --- the end of a session

STUBS = {
    "busctl": """
case "$*" in
*GetSessionByPID*) echo 'o "/org/freedesktop/login1/session/_33"' ;;
*get-property*) printf '%s\\n' "$KILL" 'as 0' 'as 1 "somebody"' ;;
*) exit 1 ;;
esac
""",
    "loginctl": 'echo "Linger=$LINGER"\n',
    "systemd-run": """
echo "$@" > scope
[ "$SCOPE" = hangs ] && exec sleep 600
[ "$SCOPE" = no ] && { echo 'Failed to connect to bus' >&2; exit 1; }
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
""",
}
"""Commands of systemd 252 as they answer in a session of logind. ``busctl`` prints a property a
line, with its type."""


@pytest.fixture
def session(tmp_path, distlaunch):
    """Return the environment of a session of logind, which may kill its processes."""
    programs = tmp_path / "stubs"
    programs.mkdir()
    for name, text in STUBS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755)

    def environ(*, kill: bool = True, linger: bool = True, scope: bool = True):
        return {
            "PATH": f"{programs}:{distlaunch.env['PATH']}",
            "KILL": f"b {'true' if kill else 'false'}",
            "LINGER": "yes" if linger else "no",
            "SCOPE": "yes" if scope else "no",
        }

    return environ


def is_in_scope(distlaunch) -> bool:
    return (distlaunch.work / "scope").exists()


def test_where_logind_kills_the_launcher_runs_in_a_scope(distlaunch, detached, session):
    job = detached(env=session())
    assert "--user --scope" in (distlaunch.work / "scope").read_text()
    assert "KillUserProcesses" not in job.result.stderr
    assert "enable-linger" not in job.result.stderr
    assert os.getsid(job.launcher) == job.launcher
    job.go()
    assert job.wait() == 0


def test_the_variable_of_the_scope_does_not_reach_the_workers(distlaunch, session):
    (distlaunch.work / "shows.py").write_text("import os\nprint(sorted(os.environ))\n")
    words = ["train", "--detach", "--num-procs", "1", "shows.py"]
    result = distlaunch.run(words, LONG_S, env=session())
    assert result.returncode == 0, result.stderr
    assert distlaunch.run(["wait", "latest"], LONG_S).returncode == 0
    shown = (distlaunch.jobs / result.stdout.strip() / "attempt-0" / "rank-0.log").read_text()
    assert "RANK" in shown
    assert "DETACHED" not in shown


def test_without_lingering_the_last_logout_ends_the_job_and_that_is_said(
    distlaunch, detached, session
):
    job = detached(env=session(linger=False))
    assert is_in_scope(distlaunch)
    assert mentions(job.result.stderr, "warning", "loginctl enable-linger")
    job.go()
    assert job.wait() == 0


def test_where_no_scope_can_be_started_the_job_starts_and_a_warning_says_so(
    distlaunch, detached, session
):
    job = detached(env=session(scope=False))
    assert is_in_scope(distlaunch)
    assert mentions(job.result.stderr, "warning", "KillUserProcesses")
    job.go()
    assert job.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_no_scope_has_started_ends_the_command(distlaunch, session, number):
    running = distlaunch.start(
        ["train", "--detach", "--num-procs", "1", PROGRAM, "1"],
        env={**session(), "SCOPE": "hangs"},
    )
    until(lambda: is_in_scope(distlaunch), "systemd-run", within_s=LONG_S)
    running.send_signal(number)
    assert running.wait(LONG_S).returncode == 128 + number
    assert list(distlaunch.jobs.glob("*")) == []


def test_where_logind_kills_nothing_nothing_is_said(distlaunch, detached, session):
    job = detached(env=session(kill=False, linger=False))
    assert not is_in_scope(distlaunch)
    assert "warning" not in job.result.stderr
    job.go()
    assert job.wait() == 0


def test_a_start_that_fails_in_a_scope_has_its_exit_code(distlaunch, session):
    result = distlaunch.train("--detach", "--num-procs", "2", "missing.py", env=session())
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("missing.py: there is no such file") == 1
