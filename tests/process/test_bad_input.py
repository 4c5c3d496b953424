"""Requests that cannot be met: one or two lines, the right exit code, nothing started, nothing
left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import venv

import pytest

from tests.facts import mentions
from tests.ports import free_port

GOOD = "open('started', 'w').close()\n"


def refused(distlaunch, *words: object, says: tuple[str, ...], env=None, code: int = 2) -> str:
    """Check that a command is refused with these words before anything happens. Return its
    message."""
    (distlaunch.work / "good.py").write_text(GOOD)
    log_dir = distlaunch.tmp_path / "logs"
    before = set(distlaunch.survivors())
    result = distlaunch.train("--log-dir", log_dir, *map(str, words), env=env)
    lines = result.stderr.splitlines()
    assert result.returncode == code, result.stderr
    assert lines[0].startswith("distlaunch: error: "), result.stderr
    assert len(lines) <= 2, result.stderr
    assert all(line.startswith("  hint: ") for line in lines[1:])
    for text in says:
        assert text in result.stderr
    assert result.stdout == ""
    assert not (distlaunch.work / "started").exists()
    assert not log_dir.exists() or not list(log_dir.iterdir()), "no run directory is made"
    assert set(distlaunch.survivors()) <= before
    return result.stderr


# --- what runs


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.py"], ("missing.py", "no such file", "looked in")),
        (["nowhere/missing.py"], ("nowhere/missing.py", "no such file")),
        (["plain"], ("plain: is a directory",)),
        (["dangling.py"], ("dangling.py", "no such file")),
        (["two\nlines.py"], ("lines.py",)),
        ([""], ("SCRIPT",)),
        ([], ("SCRIPT is missing", "[OPTIONS] SCRIPT [ARGS]")),
        (["--no-python", "no-such-program"], ("no-such-program: no such command on PATH",)),
        (["--no-python", "./good.py"], ("./good.py: is not executable", "chmod +x")),
        (["--no-python", "./missing"], ("./missing: there is no such file",)),
        (
            ["ds.json"],
            (
                "ds.json is not a Python script",
                "hint: the script's own files go after SCRIPT",
            ),
        ),
        (
            ["--backend", "accelerate", "c/acc.YAML", "good.py"],
            ("-o config=c/acc.YAML has accelerate read it",),
        ),
        (["-m", "--no-python", "good.py"], ("-m and --no-python exclude each other",)),
        (["--python", "nopython", "good.py"], ("--python nopython: no such executable",)),
        (["--python", "./good.py", "good.py"], ("--python ./good.py: no such executable",)),
        (["--workdir", "missing", "good.py"], ("--workdir missing: there is no such directory",)),
        (
            ["--workdir", "good.py", "good.py"],
            ("--workdir good.py: is a file, a directory is needed",),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_program_that_cannot_run_is_refused(distlaunch, words, says):
    (distlaunch.work / "plain").mkdir()
    (distlaunch.work / "dangling.py").symlink_to("nowhere")
    refused(distlaunch, "--num-procs", "1", *words, says=says)


def unprivileged(*capabilities: str) -> list[str]:
    """Return the words before a command that take these capabilities from root; other users lack them
    anyway."""
    if os.geteuid() != 0:
        return []
    return [
        "setpriv",
        "--bounding-set=" + ",".join(f"-{name}" for name in capabilities),
        "--inh-caps=-all",
    ]


def train_without(
    distlaunch, capabilities: tuple[str, ...], *words: str
) -> subprocess.CompletedProcess[str]:
    (distlaunch.work / "good.py").write_text(GOOD)
    command = [
        *unprivileged(*capabilities),
        sys.executable,
        "-m",
        "distlaunch",
        "train",
        "--num-procs",
        "1",
        *words,
    ]
    return subprocess.run(
        command,
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_script_that_is_named_like_a_configuration_runs_as_a_program(distlaunch):
    (distlaunch.work / "job.yml").write_text(f"#!{sys.executable}\n{GOOD}")
    (distlaunch.work / "job.yml").chmod(0o755)
    result = distlaunch.train("--num-procs", "1", "--no-python", "./job.yml")
    assert result.returncode == 0, result.stderr
    assert (distlaunch.work / "started").exists()


def test_a_script_that_this_user_cannot_read_is_refused(distlaunch):
    (distlaunch.work / "secret.py").write_text(GOOD)
    (distlaunch.work / "secret.py").chmod(0)
    result = train_without(distlaunch, ("dac_override", "dac_read_search"), "secret.py")
    assert result.returncode == 2
    assert mentions(result.stderr, "error", "secret.py", "not readable")
    assert not distlaunch.jobs.exists()
    assert not (distlaunch.work / "started").exists()


def test_a_log_directory_that_this_user_cannot_write_is_refused(distlaunch):
    (distlaunch.work / "closed").mkdir(mode=0o500)
    result = train_without(
        distlaunch, ("dac_override", "dac_read_search"), "--log-dir", "closed", "good.py"
    )
    assert result.returncode == 2
    assert result.stderr.startswith(
        "distlaunch: error: --log-dir closed: Permission denied\n  hint: "
    )
    assert not (distlaunch.work / "started").exists()


def test_a_privileged_port_is_refused(distlaunch):
    result = train_without(
        distlaunch, ("net_bind_service",), "--log-dir", "logs", "--master-port", "79", "good.py"
    )
    assert result.returncode == 2
    assert mentions(result.stderr, "error", "port 79", "privileges")
    assert "\n  hint: " in result.stderr
    assert not (distlaunch.work / "started").exists()
    assert not list(distlaunch.work.glob("logs/*"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nosuchmodule_at_all", "the module must be in {work}, in PYTHONPATH or installed"),
        ("trianer.steps", "did you mean trainer.steps?"),
    ],
)
def test_a_module_that_is_not_there_is_refused_before_anything_starts(distlaunch, name, hint):
    (distlaunch.work / "trainer").mkdir()
    (distlaunch.work / "trainer" / "__init__.py").touch()
    result = distlaunch.train("--num-procs", "2", "-m", name)
    assert (result.returncode, result.stdout, result.run_dir) == (2, "", None)
    error, hint_line = result.stderr.splitlines()
    assert mentions(error, f"-m '{name}'", sys.executable, "no such module")
    assert hint_line == f"  hint: {hint.format(work=distlaunch.work)}"


def test_a_module_that_its_package_lacks_starts_once_and_is_explained(distlaunch):
    result = distlaunch.train(
        "--num-procs", "2", "--max-restarts", "3", "-m", "json.nosuchmodule_at_all"
    )
    assert result.returncode == 1
    assert "nosuchmodule_at_all" in result.stderr
    assert len(result.of_type("attempt_started")) == 1, "it would fail again"


@pytest.mark.parametrize("how", ["workdir", "variable", "setup", "other Python"])
def test_a_module_that_only_the_workers_find_is_not_refused(distlaunch, how, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "only_there.py").write_text("print('found')\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    words = {
        "workdir": ["--workdir", str(folder)],
        "variable": ["--env", f"PYTHONPATH={os.pathsep.join([str(folder), *sys.path])}"],
        "setup": ["--setup", f"export PYTHONPATH={folder}:$PYTHONPATH"],
        "other Python": ["--python", str(python)],
    }[how]
    result = distlaunch.train("--num-procs", "1", *words, "-m", "only_there")
    assert (result.returncode, result.stdout) == (0, "[0] found\n"), result.stderr


def test_a_directory_with_a_main_module_runs(distlaunch):
    (distlaunch.work / "package").mkdir()
    (distlaunch.work / "package" / "__main__.py").write_text("print('as a package')\n")
    result = distlaunch.train("--num-procs", "1", "package")
    assert (result.returncode, result.stdout) == (0, "[0] as a package\n")


# --- sizes and devices


@pytest.mark.parametrize(
    ("option", "size"),
    [
        *(
            ("--num-procs", size)
            for size in ("0", "-1", "two", "1.5", "", "٣", "99999999999999999999")
        ),
        *(
            (option, "0")
            for option in ("--procs-per-node", "--num-gpus", "--gpus-per-node", "--num-nodes")
        ),
    ],
)
def test_a_size_that_is_no_positive_number_is_refused(distlaunch, option, size):
    refused(distlaunch, f"{option}={size}", "good.py", says=(option,))


@pytest.mark.parametrize("mask", [{}, {"CUDA_VISIBLE_DEVICES": ""}], ids=["no mask", "empty mask"])
def test_gpus_that_are_not_there_are_refused_naming_num_procs(distlaunch, mask):
    refused(distlaunch, "--num-gpus", "64", "good.py", says=("64", "GPU", "--num-procs"), env=mask)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "0,0", "good.py"], ("--gpus 0,0",)),
        (["--gpus", "GPU-no-such-uuid", "good.py"], ("--gpus GPU-no-such-uuid",)),
        (["--gpus", "x", "good.py"], ("--gpus x",)),
        (
            ["--num-procs", "2", "--num-gpus", "2", "good.py"],
            ("--num-gpus and --num-procs exclude each other",),
        ),
        (["--device", "cpu", "--num-gpus", "1", "good.py"], ("--device cpu",)),
        (["--num-procs", "2", "--num-nodes", "2", "good.py"], ("--num-nodes 2",)),
        (
            ["--num-procs", "2", "--procs-per-node", "3", "good.py"],
            ("--num-procs 2", "--procs-per-node 3"),
        ),
        (["--num-procs", "900000", "good.py"], ("900,000 workers", "ulimit")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_choice_of_workers_that_cannot_be_is_refused(distlaunch, words, says):
    refused(distlaunch, *words, says=says)


# --- options


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--num-proc", "2", "good.py"],
            ("'--num-proc'", "did you mean --num-procs?", "after SCRIPT"),
        ),
        (["--max_restart", "2", "good.py"], ("did you mean --max-restarts?",)),
        (
            ["--learning-rate", "0.1", "good.py"],
            ("'--learning-rate'", "Options of the script go after SCRIPT"),
        ),
        (["--log-dir"], ("--log-dir needs a value",)),
        (["--log-dir", "--quiet", "good.py"], ("--log-dir needs a value",)),
        (["--grace", "soon", "good.py"], ("--grace",)),
        (["--grace", "-1", "good.py"], ("--grace",)),
        (["--max-restarts", "-1", "good.py"], ("--max-restarts",)),
        (["--bind", "sockets", "good.py"], ("--bind takes none, cores or numa",)),
        (["--format", "xml", "good.py"], ("--format takes rich, plain or jsonl",)),
        (["--backend", "nosuch", "good.py"], ("no such backend", "pytorch-ddp")),
        (["--job-id", "a/b", "good.py"], ("--job-id 'a/b'",)),
        (["--job-id", "..", "good.py"], ("--job-id '..'",)),
        (["--job-id", ".x", "good.py"], ("--job-id '.x'",)),
        (["--job-id", "a\nb", "good.py"], ("--job-id",)),
        (["--output", "5", "good.py"], ("--output 5: there is no rank 5",)),
        (["--output", "some", "good.py"], ("--output some",)),
        (["--master-port", "0", "good.py"], ("--master-port",)),
        (["--master-port", "65536", "good.py"], ("--master-port",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_refused(distlaunch, words, says):
    refused(distlaunch, "--num-procs", "1", *words, says=says)


@pytest.mark.parametrize(
    ("name", "value"), [("DISTLAUNCH_GRACE", "soon"), ("DISTLAUNCH_NUM_PROCS", "0")]
)
def test_a_wrong_default_from_the_environment_is_refused_by_its_name(distlaunch, name, value):
    refused(distlaunch, "good.py", says=(name,), env={name: value})


# --- variables for workers


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("1ST=x", ("--env 1ST", "not a variable name")),
        ("A-B=x", ("--env A-B", "not a variable name")),
        ("=x", ("--env", "not a variable name")),
        ("Ä=x", ("not a variable name",)),
        ("UNSET_HERE", ("--env UNSET_HERE", "not set", "--env UNSET_HERE=VALUE")),
        *(
            (f"{name}=1", (name, "set by distlaunch"))
            for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "DISTLAUNCH_JOB_ID")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_variable_that_cannot_be_given_is_refused(distlaunch, given, says):
    refused(distlaunch, "--num-procs", "1", "--env", given, "good.py", says=says)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"A=1\n# fine\n\nno equals sign\n", "vars:4"),
        (b"\xef\xbb\xbfA=1\r\nB-C=2\r\n", "vars:2"),
        (b"A=1\nRANK=3\n", "vars:2"),
        (b"=x\n", "vars:1"),
    ],
)
def test_a_bad_line_of_a_variable_file_is_named_by_file_and_number(distlaunch, text, where):
    (distlaunch.work / "vars").write_bytes(text)
    message = refused(
        distlaunch, "--num-procs", "1", "--env-file", "vars", "good.py", says=(where,)
    )
    assert message.startswith(f"distlaunch: error: {where}: ")


def test_a_variable_file_that_is_not_there_is_refused(distlaunch):
    refused(
        distlaunch, "--num-procs", "1", "--env-file", "none", "good.py", says=("--env-file none",)
    )


@pytest.mark.parametrize("bad", [b"A=x\0y\n"], ids=["NUL"])
def test_a_value_that_no_environment_can_hold_is_refused(distlaunch, bad):
    (distlaunch.work / "vars").write_bytes(bad)
    refused(distlaunch, "--num-procs", "1", "--env-file", "vars", "good.py", says=("vars:1",))


# --- the master port


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_port_in_use_is_refused_naming_who_listens(distlaunch, family, address):
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        message = refused(
            distlaunch,
            "--num-procs",
            "1",
            "--master-port",
            port,
            "good.py",
            says=(f"port {port} is in use",),
        )
        assert re.search(rf"\bpid {os.getpid()}\b", message)


def test_a_port_of_another_running_job_of_ours_is_refused_naming_that_job(distlaunch):
    port = str(free_port())
    (distlaunch.work / "wait.py").write_text(
        "import signal\nprint('up', flush=True)\nsignal.pause()\n"
    )
    first = distlaunch.start(
        ["train", "--num-procs", "1", "--master-port", port, "--job-id", "the-first-job", "wait.py"]
    )
    first.wait_stdout("up")
    refused(
        distlaunch,
        "--num-procs",
        "1",
        "--master-port",
        port,
        "good.py",
        says=(port, "job the-first-job"),
    )
    first.send_signal(signal.SIGTERM)
    assert first.wait().returncode == 143
    (distlaunch.work / "good.py").write_text("")
    assert distlaunch.train("--num-procs", "1", "--master-port", port, "good.py").returncode == 0


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_framework_that_another_interpreter_does_not_have_is_reported_before_anything_starts(
    distlaunch, command
):
    python = distlaunch.work / "bare" / "bin" / "python"
    venv.create(python.parents[1], with_pip=False)
    (distlaunch.work / "good.py").touch()
    words = [
        command,
        "--num-procs",
        "1",
        "--backend",
        "deepspeed",
        "--python",
        str(python),
        "good.py",
    ]
    result = distlaunch.run(words)
    assert result.returncode == 2
    assert mentions(result.stderr, python, "module torch")
    assert f"{python} -m pip install 'torch'" in result.stderr
    assert result.run_dir is None
