"""Files that a configuration names are searched for where workers will search."""

from __future__ import annotations

import pytest

from distlaunch.backends.base import Backend
from distlaunch.backends.option_files import check_files
from distlaunch.core.errors import ConfigError
from tests.facts import mentions


class Reading(Backend):
    """Checks one file."""

    name = "reading"
    about = "reads a file"

    def __init__(self, path: str) -> None:
        super().__init__({}, {})
        self.path = path
        self.found: list[str | None] = []

    def check_files(self, variables, read):
        self.found.append(read(self.path, f"conf.yaml:3: file: {variables['FILE']}"))


def found(
    path: str, workdir, *, local: bool = True, read_by_default: tuple[str, ...] = ()
) -> str | None:
    backend = Reading(path)
    check_files(backend, {"FILE": path}, str(workdir), local=local, read_by_default=read_by_default)
    return backend.found[0]


@pytest.mark.parametrize("local", [True, False])
def test_a_path_is_taken_from_the_workers_directory(tmp_path, local):
    (tmp_path / "ds.json").write_text("{}")
    assert found("ds.json", tmp_path, local=local) == "{}"
    assert found(str(tmp_path / "ds.json"), "/", local=local) == "{}"


def test_a_missing_file_is_reported_with_its_path(tmp_path):
    with pytest.raises(ConfigError) as caught:
        found("ds.json", tmp_path)
    assert mentions(caught.value.message, "conf.yaml:3", "ds.json")
    assert f"{tmp_path}/ds.json" in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_a_missing_file_named_by_a_default_file_is_reported_with_how_to_ignore_that(tmp_path):
    with pytest.raises(ConfigError) as caught:
        found("ds.json", tmp_path, read_by_default=("a.yaml (-o config=none)",))
    assert str(caught.value.hint).endswith("a.yaml (-o config=none)")


def test_a_machine_that_is_not_a_node_need_not_have_the_file(tmp_path):
    assert found("ds.json", tmp_path, local=False) is None


@pytest.mark.parametrize("local", [True, False])
def test_a_path_that_is_no_file_is_reported(tmp_path, local):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"^conf\.yaml:3: .* Is a directory"):
        found("folder", tmp_path, local=local)
