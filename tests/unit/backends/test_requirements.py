"""Required packages of a backend, and the command that installs them."""

from __future__ import annotations

import venv

import pytest

from distlaunch.backends.accelerate import Accelerate
from distlaunch.backends.base import Requirement
from distlaunch.backends.requirements import (
    check_installed,
    find_modules,
    install_command,
    installed_for,
)
from distlaunch.backends.tensorflow import TensorFlow
from distlaunch.cli.pages import page_text
from distlaunch.core.errors import ConfigError
from tests import environments

LEGACY = {"TF_USE_LEGACY_KERAS": "1"}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a module with its package's metadata in a folder at the beginning of the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(module: str, version: str) -> None:
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").touch()
        records = tmp_path / f"{module}-{version}.dist-info"
        records.mkdir()
        named = module.replace("_", "-")
        (records / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {named}\nVersion: {version}\n"
        )

    return put


def missing(requirements) -> list[str]:
    return [
        install_command("py", found.requirement, found.release)
        for found in find_modules(requirements)
        if not found.is_met
    ]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.21.0", ["py -m pip install 'tf-keras==2.21.*'"]),
        ("2.16.0rc1", ["py -m pip install 'tf-keras==2.16.*'"]),
        ("2.15.1", []),
    ],
)
def test_keras_2_is_needed_beside_a_tensorflow_that_no_longer_has_it(install, version, expected):
    install("tensorflow", version)
    assert missing(TensorFlow.requires) == expected


def test_an_installed_keras_2_is_enough(install):
    install("tensorflow", "2.21.0")
    install("tf_keras", "2.21.0")
    assert missing(TensorFlow.requires) == []


def test_keras_2_is_not_needed_for_keras_3():
    backend = TensorFlow({}, {})
    assert [each.module for each in backend.needed(LEGACY)] == ["tensorflow", "tf_keras"]
    assert [each.module for each in backend.needed({"TF_USE_LEGACY_KERAS": "0"})] == ["tensorflow"]


def test_a_configuration_that_has_accelerate_use_deepspeed_needs_it():
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
    needed = Accelerate({"config": "c.yaml"}, {"config": text}).needed({})
    assert "deepspeed" in {each.module for each in needed}
    assert [each.module for each in Accelerate({}, {}).needed({})] == ["accelerate"]


def test_a_folder_beside_the_script_is_not_the_framework(tmp_path):
    wanted = (Requirement(module="gossipd", package="gossip-daemon", see="see there"),)
    (tmp_path / "gossipd").mkdir()
    with pytest.raises(ConfigError, match="no module gossipd") as caught:
        check_installed("gossip", wanted, "py", [str(tmp_path)])
    assert caught.value.hint == "py -m pip install 'gossip-daemon' (see there)"
    (tmp_path / "gossipd" / "__init__.py").touch()
    check_installed("gossip", wanted, "py", [str(tmp_path)])


def test_the_recipe_for_horovod_on_its_page_is_the_one_that_the_tests_build_with():
    readme = page_text("horovod")
    recipe = readme[readme.index("'setuptools<70'") :].partition("```")[0]
    words = {*recipe.replace("'", "").split()}
    assert words >= {f"{name}={value}" for name, value in environments.HOROVOD_BUILT_WITH.items()}
    assert words >= {"setuptools<70", "cmake", "cloudpickle", f"horovod=={environments.HOROVOD}"}
    assert "-std=gnu++20" in recipe
    assert "-std=gnu++20" in environments.COMPILER


def test_another_interpreter_reports_its_modules(tmp_path):
    python = str(tmp_path / "bare" / "bin" / "python")
    venv.create(tmp_path / "bare", with_pip=False)
    wanted = (
        Requirement(module="gossipd", package="gossip-daemon[all]", at_least="2.0"),
        *TensorFlow.requires,
    )

    def ask(*path: str):
        return installed_for(python, wanted, path, environ={}, cwd=str(tmp_path))

    with pytest.raises(ConfigError, match="no module gossipd") as caught:
        check_installed("gossip", wanted[:1], python, [], installed=ask())
    assert caught.value.hint == f"{python} -m pip install 'gossip-daemon[all]>=2.0'"
    (tmp_path / "gossipd.py").touch()
    check_installed("gossip", wanted[:1], python, [], installed=ask(str(tmp_path)))
    site = next((tmp_path / "bare").glob("lib/python*/site-packages"))
    for module, package, version in (
        ("gossipd", "gossip_daemon", "1.9"),
        ("tensorflow", "tensorflow", "2.21.0"),
    ):
        (site / f"{module}.py").touch()
        (site / f"{package}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        (site / f"{package}-{version}.dist-info" / "METADATA").write_text(metadata)
    with pytest.raises(ConfigError, match=r"gossip-daemon 1\.9 .* 2\.0"):
        check_installed("gossip", wanted, python, [], installed=ask())
    assert [each.release for each in find_modules(TensorFlow.requires, installed=ask())] == [
        "",
        "2.21",
    ]


def test_an_interpreter_that_does_not_answer_is_not_reported(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    for python in (str(program), str(tmp_path / "none")):
        assert installed_for(python, TensorFlow.requires, (), environ={}, cwd=str(tmp_path)) is None
