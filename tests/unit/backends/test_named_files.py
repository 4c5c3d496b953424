"""Files that workers read, named by a configuration: they are looked for where workers will
look."""

from __future__ import annotations

import pytest

from distlaunch.backends.base import Backend
from distlaunch.backends.option_files import check_files
from distlaunch.core.errors import ConfigError


class Reading(Backend):
    """Looks at one file."""

    name = "reading"
    about = "reads a file"

    def __init__(self, path: str) -> None:
        super().__init__({}, {})
        self.path = path
        self.found: list[str | None] = []

    def check_files(self, variables, read):
        self.found.append(read(self.path, f"conf.yaml:3: file: {variables['FILE']}"))


def found(path: str, workdir, *, local: bool = True, unasked: tuple[str, ...] = ()) -> str | None:
    backend = Reading(path)
    check_files(backend, {"FILE": path}, str(workdir), local=local, unasked=unasked)
    return backend.found[0]


@pytest.mark.parametrize("local", [True, False])
def test_a_path_is_taken_from_the_workers_directory(tmp_path, local):
    (tmp_path / "ds.json").write_text("{}")
    assert found("ds.json", tmp_path, local=local) == "{}"
    assert found(str(tmp_path / "ds.json"), "/", local=local) == "{}"


def test_a_file_that_is_not_there_is_told_of_with_where_it_was_looked_for(tmp_path):
    with pytest.raises(ConfigError) as caught:
        found("ds.json", tmp_path)
    assert caught.value.message == "conf.yaml:3: file: ds.json: there is no such file"
    assert f"{tmp_path}/ds.json" in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_where_a_file_that_nobody_asked_for_names_it_how_to_do_without_is_told(tmp_path):
    with pytest.raises(ConfigError) as caught:
        found("ds.json", tmp_path, unasked=("a.yaml is read (-o config=none does without)",))
    assert str(caught.value.hint).endswith(
        "put the file there; a.yaml is read (-o config=none does without)"
    )


def test_a_machine_that_is_none_of_the_nodes_need_not_have_it(tmp_path):
    assert found("ds.json", tmp_path, local=False) is None


@pytest.mark.parametrize("local", [True, False])
def test_what_is_no_file_is_told_of(tmp_path, local):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"^conf\.yaml:3: file: folder: Is a directory"):
        found("folder", tmp_path, local=local)
