from __future__ import annotations

import sys

import pytest


@pytest.fixture
def read_page(distlaunch, screen):
    """Show a page on the terminal. Return its text."""

    def read(pager: dict[str, str]) -> str:
        env = {"TERM": "xterm", **pager}
        running = distlaunch.start(["help", "quickstart"], env=env, **screen.streams())
        assert screen.read_until_end(running).returncode == 0
        return screen.seen.decode()

    return read


def test_a_page_goes_to_the_pager_of_the_user(distlaunch, read_page):
    pager = distlaunch.work / "pager.py"
    pager.write_text("import sys\nprint('PAGER HAS', len(sys.stdin.read()) > 1000)\n")
    shown = read_page({"PAGER": f"X=1 {sys.executable} {pager}"})
    assert shown.split() == ["PAGER", "HAS", "True"]


@pytest.mark.parametrize("name", ["PAGER", "MANPAGER"])
def test_a_pager_that_does_not_exist_leaves_the_page_on_the_terminal(read_page, name):
    shown = read_page({name: "no-such-pager -R"})
    assert "Stop a job" in shown
    assert "Set options by the environment" in shown
    assert "not found" not in shown
