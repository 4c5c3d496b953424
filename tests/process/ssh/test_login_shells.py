"""Login shells of every kind, their Pythons, and failures between the login and the agent."""

from __future__ import annotations

import shutil
import sys
import time

import pytest

from tests.contract.test_links import End
from tests.facts import mentions
from tests.process.ssh.conftest import failure, program, reach, works
from tests.sshd import stand_in

SHELLS = ("sh", "dash", "bash", "tcsh", "fish", "zsh")
NOISE = 1 << 20


# --- login shells


@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_will_do(serve, tmp_path, shell, way):
    path = shutil.which(shell)
    assert path, f"{shell} is not installed"
    home = tmp_path / "home"
    home.mkdir()
    server = serve(f'ForceCommand exec env HOME={home} {path} -c "$SSH_ORIGINAL_COMMAND"')
    works(server.config(), way=way)


@pytest.mark.parametrize("shell", ["bash", "tcsh", "fish", "zsh"])
def test_noise_of_start_up_files_is_passed_over(serve, tmp_path, shell, way):
    home = tmp_path / "home"
    (home / ".config" / "fish").mkdir(parents=True)
    for name in (".bashrc", ".tcshrc", ".zshenv", ".config/fish/config.fish"):
        (home / name).write_text(
            'echo "welcome; distlaunch-agent is not here"\necho no newline | tr -d "\\n"\n'
        )
    rc = f"BASH_ENV={home}/.bashrc"
    server = serve(
        f'ForceCommand exec env HOME={home} {rc} {shutil.which(shell)} -c "$SSH_ORIGINAL_COMMAND"'
    )
    works(server.config(), way=way)


def test_a_shell_that_prints_a_mebibyte_before_it_reads_is_passed_over(serve, way):
    server = serve(
        f'ForceCommand head -c {NOISE} /dev/zero; head -c {NOISE} /dev/zero >&2; eval "$SSH_ORIGINAL_COMMAND"'
    )
    works(server.config(), way=way)


def test_a_banner_before_the_login_is_passed_over(serve, tmp_path, way):
    banner = tmp_path / "banner"
    banner.write_text("authorized users only\n" * 100)
    works(serve(f"Banner {banner}").config(), way=way)


@pytest.mark.parametrize(
    "name", ["with space", "dollar$HOME", "back`tick`", "tilde~", "uml\u00e4ut"]
)
def test_an_interpreter_with_an_odd_path_is_used(sshd, tmp_path, name, way):
    odd = tmp_path / name / "python"
    odd.parent.mkdir()
    program(odd, f'#!/bin/sh\nODD=1 exec {sys.executable} "$@"\n')
    source = "import os\ndef main(word, code_fd):\n    os.write(1, b'\\ndistlaunch-agent ' + word.encode() + b'\\n' + os.environ.get('ODD', '0').encode())\n"
    link = reach(sshd.config(), way=way, pythons=[str(odd)], code=stand_in(source))
    try:
        assert End(link).read(1) == b"1"
    finally:
        link.close()


@pytest.mark.parametrize("name", ["quote'", "back\\slash", "bang!", "new\nline"])
def test_an_interpreter_whose_path_no_shell_would_survive_is_passed_over(sshd, tmp_path, name):
    odd = tmp_path / name / "python"
    odd.parent.mkdir()
    program(odd, "#!/bin/sh\nexit 7\n")
    works(sshd.config(), pythons=[str(odd), sys.executable])


def test_the_next_interpreter_is_tried_where_one_cannot_be_run(sshd, tmp_path, way):
    broken = program(tmp_path / "broken", "#!/no/such/interpreter\n")
    crash = program(
        tmp_path / "missing-library",
        "#!/bin/sh\necho error while loading shared libraries >&2\nexit 127\n",
    )
    old = program(tmp_path / "old", f"#!/bin/sh\n{fake_python('3.8.10')}\n")
    ancient = program(tmp_path / "python2", "#!/bin/sh\necho Unknown option: -I >&2\nexit 2\n")
    pythons = [
        str(path) for path in (broken, crash, old, ancient, tmp_path / "absent", sys.executable)
    ]
    works(sshd.config(), way=way, pythons=pythons)


def fake_python(version: str) -> str:
    return f'echo "distlaunch-old {version}"; exit 97'


def without_python(serve, tmp_path, *, first: str = ""):
    """Start a server whose logins find the tools of a system, but no Python."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "head", "env", "cat"):
        (tools / name).symlink_to(str(shutil.which(name)))
    # The interpreters' absolute names lead nowhere where the root of the file system is another.
    script = program(
        tmp_path / "shell",
        f'#!/bin/sh\nPATH={tools}; export PATH; {first}\nexec /bin/sh -c "$(printf %s "$SSH_ORIGINAL_COMMAND" | {shutil.which("sed")} "s|/usr/bin/python3|/no/python3|; s|/usr/local/bin/python3|/no/python3|")"\n',
    )
    return serve(f"ForceCommand {script}"), tools


def test_a_node_without_python_is_reported_to_have_none(serve, tmp_path, way):
    server, _ = without_python(serve, tmp_path)
    failed = failure(server.config(), way=way, pythons=["/no/such/python"])
    assert (failed.step, failed.passing) == ("python", False)
    assert mentions(failed.text, "no Python", "PATH", "3.10")
    assert "--python" in failed.hint


def test_pythons_that_are_too_old_are_named_with_their_versions(serve, tmp_path, way):
    server, tools = without_python(serve, tmp_path)
    program(tools / "python3", f"#!/bin/sh\n{fake_python('3.8.10')}\n")
    program(tools / "python3.12", "#!/bin/sh\nexit 127\n")
    ancient = program(tmp_path / "ancient", "#!/bin/sh\nexit 2\n")
    failed = failure(server.config(), way=way, pythons=[str(ancient)])
    assert failed.step == "python"
    assert mentions(
        failed.text,
        "3.4",
        ancient,
        "Python 3.8.10",
        f"{tools}/python3",
        f"{tools}/python3.12",
        "3.10",
    )


# --- what goes wrong after the login


def test_a_forced_command_is_shown_by_its_output(serve, way):
    server = serve("ForceCommand echo only backups here; exit 3")
    failed = failure(server.config(), way=way)
    assert (failed.step, failed.passing) == ("agent", False)
    assert mentions(failed.text, "login ended", "status 3", "only backups here")


def test_a_login_shell_that_refuses_is_named_by_its_status(serve, way):
    failed = failure(serve("ForceCommand /bin/false").config(), way=way)
    assert mentions(failed.text, "login ended", "status 1")


def test_an_agent_that_breaks_while_it_starts_shows_its_last_lines(sshd, way):
    failed = failure(
        sshd.config(),
        way=way,
        code=stand_in("def main(word, code_fd):\n    raise RuntimeError('no way')\n"),
    )
    assert failed.step == "agent"
    assert mentions(failed.text, "agent failed", "status 1")
    assert failed.text.endswith("RuntimeError: no way")


def test_output_of_a_node_cannot_move_the_cursor(serve, way):
    failed = failure(serve("ForceCommand printf 'a\\033[2Jb\\n\\007c'; exit 3").config(), way=way)
    assert failed.text.endswith(r"a\x1b[2Jb / \x07c")
    assert failed.text.isprintable()


def test_a_shell_that_prints_nothing_ends_at_the_deadline(serve, way):
    server = serve("ForceCommand echo hold on; sleep 20")
    started = time.monotonic()
    failed = failure(server.config(), way=way, within_s=2.0)
    assert time.monotonic() - started < 15
    assert (failed.step, failed.passing) == ("agent", True)
    assert mentions(failed.text, "in time", "hold on")


def test_a_shell_that_prints_without_end_is_left(serve, way):
    failed = failure(serve("ForceCommand cat /dev/zero").config(), way=way)
    assert mentions(failed.text, "node", "16 MiB")


def test_a_greeting_with_another_token_is_noise(serve, way):
    failed = failure(
        serve("ForceCommand echo; echo distlaunch-agent 0123; exit 4").config(), way=way
    )
    assert failed.step == "agent"


def test_a_server_that_opens_no_session_is_reported(serve, way):
    failed = failure(serve("MaxSessions 0").config(), way=way)
    assert failed.step in ("agent", "connect")
    assert "session" in failed.text or "open failed" in failed.text
