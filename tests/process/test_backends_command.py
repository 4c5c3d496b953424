"""``distlaunch backends``, ``-o``, and a backend that another, really installed package brings."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from tests.facts import mentions
from tests.launcher import PROGRAMS

USAGE = 2


@pytest.fixture(scope="module")
def gossip(tmp_path_factory):
    """Install the example package as a user would, into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "third_party"
    subprocess.run(
        ["cp", "-r", PROGRAMS / "third_party", source], check=True
    )  # setuptools writes beside its sources
    words = ["install", "--quiet", "--no-deps", "--target", str(folder), str(source)]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words], check=True)
    return str(folder)


def shown(distlaunch, *words, **env):
    result = distlaunch.run(["backends", *words], env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def install(site, package, points):
    """Write the records of a package with these backends."""
    records = site / f"{package}-1.0.dist-info"
    records.mkdir()
    (records / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (records / "entry_points.txt").write_text("\n".join(["[distlaunch.backends]", *lines]))


def test_all_backends_are_listed_with_what_is_installed(distlaunch):
    records = {each["name"]: each for each in json.loads(shown(distlaunch, "--format", "json"))}
    assert records["pytorch-ddp"]["installed"]
    assert records["pytorch-ddp"]["problem"] is None
    text = shown(distlaunch)
    assert all(f"{name} " in text for name in records)


def test_on_a_terminal_lines_are_folded_and_commands_are_whole(distlaunch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    argv = [sys.executable, "-m", "distlaunch", "backends"]
    with (
        open(ours, "rb", buffering=0) as screen,
        subprocess.Popen(argv, stdout=theirs, env=distlaunch.env) as shower,
    ):
        os.close(theirs)
        text = ""
        with suppress(OSError):  # EIO: all has been read
            while more := screen.read(1 << 16):
                text += more.decode()
        assert shower.wait(60) == 0
    lines = text.replace("\r", "").splitlines()
    assert [line for line in lines if len(line) > 80 and " -m pip install " not in line] == []
    assert any(line.startswith(" " * 14) and "installed" not in line for line in lines), (
        "something is folded"
    )
    whole = shown(distlaunch)
    assert max(map(len, whole.splitlines())) > 80, "what a program reads is not"
    assert " ".join(text.split()) == " ".join(whole.split())


@pytest.mark.parametrize(
    ("module", "package", "version", "message"),
    [
        ("ray", "ray", "2.48.0", "installed: ray 2.48.0"),
        ("ray", "ray", "1.13.0", "ray 1.13.0 is too old: "),
        ("tensorflow", "tensorflow_cpu", "2.19.0", "installed: tensorflow-cpu 2.19.0"),
        ("tensorflow", "tensorflow_rocm", "2.1.0", "tensorflow-rocm 2.1.0 is too old: "),
        ("tensorflow", "", "", "installed: tensorflow (no version)"),
    ],
)
def test_an_installed_backend_is_listed_with_its_package(
    distlaunch, tmp_path, module, package, version, message
):
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").touch()
    if package:
        records = tmp_path / f"{package}-{version}.dist-info"
        records.mkdir()
        named = package.replace("_", "-")
        (records / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {named}\nVersion: {version}\n"
        )
        (records / "top_level.txt").write_text(f"{module}\n")
        (records / "RECORD").write_text(f"{module}/__init__.py,,\n")
    assert message in shown(distlaunch, module, PYTHONPATH=str(tmp_path))


def test_another_interpreter_is_asked_what_it_has(distlaunch, tmp_path):
    records = tmp_path / "site" / "ray-2.48.0.dist-info"
    records.mkdir(parents=True)
    (records / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.48.0\n")
    (tmp_path / "site" / "ray").mkdir()
    (tmp_path / "site" / "ray" / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert "installed: ray 2.48.0" in shown(distlaunch, "ray", "--python", python)
    assert "installed: ray 2.48.0" in shown(distlaunch, DISTLAUNCH_PYTHON=str(python))
    assert f"{python} -m pip install 'accelerate" in shown(
        distlaunch, "accelerate", "--python", python
    )


@pytest.mark.parametrize(
    ("python", "why"), [("nopython", "no such executable"), ("true", "it did not answer")]
)
def test_an_invalid_interpreter_is_refused(distlaunch, python, why):
    result = distlaunch.run(["backends", "--python", python])
    assert (result.returncode, result.stdout) == (USAGE, "")
    assert result.stderr.startswith(f"distlaunch: error: --python {python}: {why}")


def test_the_variable_that_names_what_is_no_interpreter_is_named_and_the_option_wins(distlaunch):
    result = distlaunch.run(["backends"], env={"DISTLAUNCH_PYTHON": "nopython"})
    assert mentions(result.stderr, "DISTLAUNCH_PYTHON nopython")
    result = distlaunch.run(
        ["backends", "--python", "noother"], env={"DISTLAUNCH_PYTHON": "nopython"}
    )
    assert mentions(result.stderr, "--python noother")


def test_an_interpreter_is_asked_once_for_all_backends(distlaunch, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho asked >> {tmp_path}/asked\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    records = json.loads(shown(distlaunch, "--python", python, "--format", "json"))
    assert {each["name"]: each["installed"] for each in records}["pytorch-ddp"]
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_a_package_without_a_name_is_reported_as_unknown(distlaunch, tmp_path):
    install(tmp_path, "nameless", {"ray": "nameless:Ray"})
    (tmp_path / "nameless-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nVersion: 1.0\n"
    )
    records = json.loads(shown(distlaunch, "--format", "json", PYTHONPATH=str(tmp_path)))
    [problem] = [each["problem"] for each in records if each["problem"]]
    assert mentions(problem, "not used", "ours")


def test_one_backend_is_shown_with_its_options(distlaunch, gossip):
    text = shown(distlaunch, "gossip", PYTHONPATH=gossip)
    assert "installed: gossip-backend 1.2" in text
    assert [line.split()[0] for line in text.splitlines() if "=" in line and "-o" not in line] == [
        "rounds=N",
        "topology=ring|star",
        "loud=on|off",
    ]


def test_backends_of_other_packages_are_listed_with_the_reason_if_they_cannot_be_used(
    distlaunch, gossip
):
    records = json.loads(shown(distlaunch, "--format", "json", PYTHONPATH=gossip))
    problems = {each["name"]: each["problem"] for each in records if each["problem"]}
    assert problems.keys() == {"pytorch-ddp", "broken", "nothing"}
    assert "gossip-backend" in problems["pytorch-ddp"]
    assert "ModuleNotFoundError" in problems["broken"]
    assert mentions(problems["nothing"], "not a backend")


def test_another_packages_backend_sets_what_its_workers_need(distlaunch, gossip):
    script = distlaunch.work / "show.py"
    script.write_text(
        "import os\nnames = ['RANK', 'GOSSIP_NEIGHBOUR', 'GOSSIP_ROUNDS', 'DISTLAUNCH_BACKEND', 'DISTLAUNCH_BACKEND_OPTIONS']\n"
        "print(*(os.environ[name] for name in names))\n"
    )
    words = [
        "--backend",
        "gossip",
        "-o",
        "rounds=3",
        "--opt",
        "topology=ring",
        "--num-procs",
        "2",
        "--device",
        "cpu",
    ]
    result = distlaunch.train(*words, script, env={"PYTHONPATH": gossip})
    assert result.returncode == 0, result.stderr
    reported = 'gossip {"rounds":3,"topology":"ring"}'
    assert sorted(result.stdout.splitlines()) == [f"[0] 0 1 3 {reported}", f"[1] 1 0 3 {reported}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "gosip"], "did you mean gossip?"),
        (["--backend", "ddp"], "did you mean pytorch-ddp?"),
        (["--backend", "gossip", "-o", "round=3"], "did you mean rounds?"),
        (["--backend", "gossip", "-o", "rounds"], "-o rounds=N"),
        (["--backend", "gossip", "-o", "rounds=-1"], "rounds takes N"),
        (["--backend", "gossip", "-o", "topology=rnig"], "did you mean ring?"),
        (["--backend", "gossip", "-o", "loud=perhaps"], "loud takes on|off"),
        (["--backend", "gossip", "-o", "rounds=1", "-o", "rounds=2"], "given twice: 1 and 2"),
        (["--backend", "broken"], "gossip-backend could not be loaded"),
        (["-o", "rounds=1"], "pytorch-ddp has no option 'rounds'"),
    ],
)
def test_an_invalid_value_is_named_with_the_valid_ones(distlaunch, gossip, words, message):
    result = distlaunch.train(*words, "--num-procs", "1", "x.py", env={"PYTHONPATH": gossip})
    assert result.returncode == USAGE
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("required", "message"),
    [
        ('module="gossipd", package="gossip-daemon"', "-m pip install 'gossip-daemon'"),
        (
            'module="gossip_backend", package="gossip-backend", at_least="1.10"',
            "gossip-backend 1.2 is older than 1.10",
        ),
    ],
    ids=["missing", "too old"],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    distlaunch, gossip, tmp_path, required, message
):
    changed = tmp_path / "changed"
    subprocess.run(["cp", "-r", gossip, changed], check=True)
    source = changed / "gossip_backend" / "__init__.py"
    before = 'module="gossip_backend", package="gossip-backend", at_least="1.1"'
    assert before in source.read_text()
    source.write_text(source.read_text().replace(before, required))
    (distlaunch.work / "x.py").touch()
    words = ["--backend", "gossip", "--num-procs", "1", "--device", "cpu", "x.py"]
    result = distlaunch.train(*words, env={"PYTHONPATH": str(changed)})
    assert result.returncode == USAGE
    assert message in result.stderr
    assert "pip install" in shown(distlaunch, "gossip", PYTHONPATH=str(changed))


def test_a_faulty_backend_of_another_package_does_not_keep_the_others_from_being_listed(
    distlaunch, tmp_path
):
    (tmp_path / "faulty.py").write_text(
        "from distlaunch.backends.base import Backend\n"
        "class Silent(Backend):\n    name = 'silent'\n"
        "class Other(Backend):\n    name, about = 'otherone', 'x'\n"
        "class Broken(Backend):\n    name, about = 'options', 'x'\n    options = classmethod(lambda cls: 1 / 0)\n"
        "class Number(Backend):\n    name, about = 'number', 'x'\n    def worker_variables(self, *_): return {'N': 3}\n"
    )
    names = {"silent": "Silent", "alias": "Other", "options": "Broken", "number": "Number"}
    install(tmp_path, "faulty", {name: f"faulty:{kind}" for name, kind in names.items()})
    listed = json.loads(shown(distlaunch, "--format", "json", PYTHONPATH=str(tmp_path)))
    problems = {each["name"]: each["problem"] for each in listed if each["name"] in names}
    assert problems.pop("number") is None
    assert problems.keys() == {"silent", "alias", "options"}
    assert all("error in faulty" in message for message in problems.values())
    (distlaunch.work / "x.py").touch()
    for name in names:
        result = distlaunch.train(
            "--backend", name, "-o", "a", "x.py", env={"PYTHONPATH": str(tmp_path)}
        )
        assert result.returncode == USAGE
        result = distlaunch.train("--backend", name, "x.py", env={"PYTHONPATH": str(tmp_path)})
        assert result.returncode == (0 if name == "options" else USAGE), (
            "no option, nobody asks for them"
        )
    result = distlaunch.train("--backend", "number", "x.py", env={"PYTHONPATH": str(tmp_path)})
    assert mentions(result.stderr, "value of N", "'3'")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("import sys\nsys.exit('bye')", "SystemExit: bye"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
    ids=["sys.exit(0)", "sys.exit('bye')", "KeyboardInterrupt"],
)
def test_a_package_that_ends_python_on_import_ends_nothing(distlaunch, tmp_path, source, message):
    (tmp_path / "leaver.py").write_text(source)
    install(tmp_path, "leaver", {"leaves": "leaver:Leaves"})
    env = {"PYTHONPATH": str(tmp_path)}
    problem = f"leaver could not be loaded: {message}"
    records = {
        each["name"]: each for each in json.loads(shown(distlaunch, "--format", "json", **env))
    }
    assert records["leaves"]["problem"] == problem
    assert records["pytorch-ddp"]["installed"]
    result = distlaunch.train("--backend", "leaves", "x.py", env=env)
    assert (result.returncode, result.stdout) == (USAGE, "")
    assert f"error: --backend 'leaves': {problem}\n" in result.stderr


@pytest.mark.parametrize(
    "then", ["pass", "raise", "sys.exit(0)"], ids=["forgotten", "passed on", "sys.exit(0)"]
)
def test_a_ctrl_c_while_a_package_is_imported_ends_the_launcher(distlaunch, tmp_path, then):
    pressed = "import signal, sys\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n"
    (tmp_path / "slow.py").write_text(f"{pressed}    {then}")
    install(tmp_path, "slow", {"slow": "slow:Slow"})
    for words in (["train", "--backend", "slow", "x.py"], ["backends"]):
        result = distlaunch.run(words, env={"PYTHONPATH": str(tmp_path)})
        assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_output_of_another_package_is_kept_out_of_a_plan(distlaunch, tmp_path):
    (tmp_path / "loud.py").write_text(
        "import os, subprocess\nfrom distlaunch.backends.base import Backend\n"
        "print('by python')\nos.write(1, b'by a library\\n')\nsubprocess.run(['echo', 'by a child'], check=True)\n"
        "class Loud(Backend):\n    name, about = 'loud', 'x'\n"
        "    def job_variables(self, topology):\n        print('by a method')\n        return {'LOUD': '1'}\n"
    )
    install(tmp_path, "loud", {"loud": "loud:Loud"})
    (distlaunch.work / "x.py").touch()
    words = [
        "plan",
        "--backend",
        "loud",
        "--num-procs",
        "1",
        "--device",
        "cpu",
        "--format",
        "json",
        "x.py",
    ]
    result = distlaunch.run(words, env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["backend"] == "loud"
    message = [line for line in result.stderr.splitlines() if line.startswith("by ")]
    assert sorted(message) == ["by a child", "by a library", "by a method", "by python"]


@pytest.mark.parametrize(
    "spoilt", [b"no word of it\n", b"\xff = a:B\n"], ids=["no entry", "no text"]
)
def test_a_package_with_spoilt_records_takes_no_others_away(distlaunch, gossip, tmp_path, spoilt):
    install(tmp_path, "spoilt", {})
    (tmp_path / "spoilt-1.0.dist-info" / "entry_points.txt").write_bytes(
        b"[distlaunch.backends]\n" + spoilt
    )
    env = {"PYTHONPATH": f"{tmp_path}:{gossip}"}
    assert "installed: gossip-backend 1.2" in shown(distlaunch, **env)
    result = distlaunch.train("--backend", "gosip", "x.py", env=env)
    assert result.returncode == USAGE
    assert mentions(result.stderr, "hint", "gossip?")


def test_a_package_without_a_name_is_called_unknown(distlaunch, tmp_path):
    install(tmp_path, "nameless", {"absent": "nowhere:Absent"})
    (tmp_path / "nameless-1.0.dist-info" / "METADATA").unlink()
    result = distlaunch.train("--backend", "absent", "x.py", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == USAGE
    assert mentions(result.stderr, "unknown package", "ModuleNotFoundError")


def test_a_name_that_two_packages_have_cannot_be_used(distlaunch, gossip, tmp_path):
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", gossip, other], check=True)
    found = next(other.glob("*.dist-info"))
    found.rename(other / "chatter-1.0.dist-info")
    metadata = other / "chatter-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("gossip-backend", "chatter"))
    entry_points = other / "chatter-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text("[distlaunch.backends]\ngossip = gossip_backend:Gossip\n")
    env = {"PYTHONPATH": f"{gossip}:{other}"}
    result = distlaunch.train("--backend", "gossip", "--num-procs", "1", "x.py", env=env)
    assert result.returncode == USAGE
    assert "two packages" in result.stderr
    assert "chatter" in result.stderr
