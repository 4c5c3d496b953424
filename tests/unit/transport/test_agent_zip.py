from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import distlaunch
from distlaunch.transport.bootstrap import agent_zip

PACKAGE = Path(distlaunch.__file__).parent
IMPORTS = (
    "import sys; sys.path.insert(0, sys.argv[1]); import distlaunch.core.agent.workers.spawner as module;"
    "print(module.__file__, module.__cached__)"
)


@pytest.fixture(scope="module")
def packed():
    return agent_zip()


@pytest.fixture(scope="module")
def members(packed):
    with zipfile.ZipFile(io.BytesIO(packed)) as file:
        assert file.testzip() is None
        return {name: file.read(name) for name in file.namelist()}


def test_it_has_every_module_of_core_as_source_and_as_code_and_no_other(members):
    sources = [PACKAGE / "__init__.py", *(PACKAGE / "core").rglob("*.py")]
    expected = {f"distlaunch/{path.relative_to(PACKAGE).as_posix()}" for path in sources}
    assert {name for name in members if name.endswith(".py")} == expected
    assert {name for name in members if name.endswith(".pyc")} == {name + "c" for name in expected}
    assert (
        members["distlaunch/core/agent/boot/sitecustomize.py"]
        == (PACKAGE / "core/agent/boot/sitecustomize.py").read_bytes()
    )


def test_its_code_is_this_pythons_and_is_compared_with_no_file(members):
    for name, data in members.items():
        if name.endswith(".pyc"):
            assert data[:4] == importlib.util.MAGIC_NUMBER
            assert data[4:16] == bytes([1]) + bytes(11)


def test_the_same_python_compiles_nothing(packed, tmp_path):
    (tmp_path / "agent.zip").write_bytes(packed)
    assert (
        imported(sys.executable, tmp_path / "agent.zip")
        == f"{tmp_path}/agent.zip/distlaunch/core/agent/workers/spawner.pyc"
    )


def imported(python: str, path: Path) -> str:
    command = [python, "-I", "-S", "-c", IMPORTS, str(path)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()[0]


def test_code_of_another_version_is_passed_over(packed, tmp_path):
    magic, other = importlib.util.MAGIC_NUMBER, b"\x01\x02\r\n"
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(packed)) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(
                name,
                old.read(name).replace(magic, other, 1)
                if name.endswith(".pyc")
                else old.read(name),
            )
    (tmp_path / "agent.zip").write_bytes(changed.getvalue())
    assert imported(sys.executable, tmp_path / "agent.zip").endswith("spawner.py")


MAKE = """
import sys
sys.path.insert(0, sys.argv[1])
import distlaunch
assert distlaunch.__file__.startswith(sys.argv[1]), distlaunch.__file__
from distlaunch.transport.bootstrap import agent_zip
open(sys.argv[2], 'wb').write(agent_zip())
"""


def test_it_is_the_same_where_distlaunch_itself_comes_from_a_zip(members, tmp_path):
    wheel = Path(shutil.make_archive(str(tmp_path / "wheel"), "zip", PACKAGE.parent, "distlaunch"))
    assert alike(made_from(wheel, tmp_path), members)


def test_a_folder_that_cannot_be_written_and_was_never_compiled_will_do(members, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGE, copy / "distlaunch", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    assert alike(made_from(copy, tmp_path), members)
    for folder in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        folder.chmod(0o755)


def test_code_that_the_import_cache_has_of_an_older_source_is_not_used(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGE, copy / "distlaunch")
    text = (copy / "distlaunch/core/errors.py").read_text()
    made_from(copy, tmp_path)
    (copy / "distlaunch/core/errors.py").write_text(text + "CHANGED = 1\n")
    assert b"CHANGED" in made_from(copy, tmp_path)["distlaunch/core/errors.pyc"]


def alike(one: dict[str, bytes], other: dict[str, bytes]) -> bool:
    """Return whether the zips have the same sources, and code with the same headers: code contains
    the file's path."""
    return {name: data[:16] if name.endswith("c") else data for name, data in one.items()} == {
        name: data[:16] if name.endswith("c") else data for name, data in other.items()
    }


def made_from(place: Path, tmp_path: Path) -> dict[str, bytes]:
    out = tmp_path / "made.zip"
    environ = {"PATH": os.defpath}
    command = [sys.executable, "-I", "-S", "-c", MAKE, str(place), str(out)]
    subprocess.run(command, check=True, env=environ, timeout=120)
    with zipfile.ZipFile(out) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_making_it_reads_the_package_and_leaves_no_descriptor(packed):
    before = len(os.listdir("/proc/self/fd"))
    agent_zip()
    assert len(os.listdir("/proc/self/fd")) == before
