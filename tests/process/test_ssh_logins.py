"""Login shells of every kind, and what goes wrong on the way to an agent, with a real sshd; both ways to connect."""

from __future__ import annotations

import os
import pty
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distlaunch.job.transport.hostkeys import HostKeyCheck
from distlaunch.job.transport.link import Target, Unconnected
from distlaunch.job.transport.openssh import OpenSsh
from distlaunch.job.transport.ssh import Ssh
from distlaunch.job.transport.sshconfig import Asked
from tests.contract.test_links import End
from tests.sshd import Sshd, make_key, stand_in

BOUND_S = 60.0
SHELLS = ("sh", "dash", "bash", "tcsh", "fish", "zsh")
NOISE = 1 << 20


@pytest.fixture(params=["paramiko", "openssh"])
def way(request):
    return request.param


@pytest.fixture
def serve(tmp_path):
    """Start servers; all of them, and what they run, are gone at the end."""
    started = []

    def start(*settings, name="sshd", **more):
        server = Sshd(tmp_path / name, *settings, **more)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def sshd(serve):
    return serve()


def reach(
    config, *, way="paramiko", mode="strict", host="node", code=None, pythons=(sys.executable,), within_s=BOUND_S,
    environ=None, asked=None, user=None,
):  # fmt: skip
    asked = asked or Asked(config=str(config))
    environ = dict(os.environ) if environ is None else environ
    code = code or stand_in()
    if way == "openssh":
        opener = OpenSsh("ssh", asked=asked, host_keys=mode, code=code, pythons=pythons, environ=environ)
    else:
        opener = Ssh(asked=asked, check=HostKeyCheck(mode), code=code, pythons=pythons, environ=environ)
    return opener.open(Target(host=host, user=user), within_s)


def failure(config, **more):
    with pytest.raises(Unconnected) as caught:
        reach(config, **more).close()
    return caught.value.failure


def works(config, **more) -> None:
    link = reach(config, **more)
    try:
        link.send(b"echo 5\nhello")
        assert End(link).read(5) == b"hello"
    finally:
        link.close()


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


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
        (home / name).write_text('echo "welcome; distlaunch-agent is not here"\necho no newline | tr -d "\\n"\n')
    rc = f"BASH_ENV={home}/.bashrc"
    server = serve(f'ForceCommand exec env HOME={home} {rc} {shutil.which(shell)} -c "$SSH_ORIGINAL_COMMAND"')
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


@pytest.mark.parametrize("name", ["with space", "dollar$HOME", "back`tick`", "tilde~", "uml\u00e4ut"])
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
        tmp_path / "missing-library", "#!/bin/sh\necho error while loading shared libraries >&2\nexit 127\n"
    )
    old = program(tmp_path / "old", f"#!/bin/sh\n{fake_python('3.8.10')}\n")
    ancient = program(tmp_path / "python2", "#!/bin/sh\necho Unknown option: -I >&2\nexit 2\n")
    pythons = [str(path) for path in (broken, crash, old, ancient, tmp_path / "absent", sys.executable)]
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


def test_a_node_without_python_is_said_to_have_none(serve, tmp_path, way):
    server, _ = without_python(serve, tmp_path)
    failed = failure(server.config(), way=way, pythons=["/no/such/python"])
    assert (failed.step, failed.passing) == ("python", False)
    assert failed.text == "node has no Python on its PATH; the agent needs 3.10 or newer"
    assert "--python" in failed.hint


def test_pythons_that_are_too_old_are_named_with_their_versions(serve, tmp_path, way):
    server, tools = without_python(serve, tmp_path)
    program(tools / "python3", f"#!/bin/sh\n{fake_python('3.8.10')}\n")
    program(tools / "python3.12", "#!/bin/sh\nexit 127\n")
    ancient = program(tmp_path / "ancient", "#!/bin/sh\nexit 2\n")
    failed = failure(server.config(), way=way, pythons=[str(ancient)])
    assert failed.step == "python"
    assert failed.text == (
        f"node has a Python before 3.4 ({ancient}), Python 3.8.10 ({tools}/python3) and {tools}/python3.12,"
        " which cannot be run; the agent needs 3.10 or newer"
    )


# --- what goes wrong after the login


def test_a_forced_command_is_shown_by_what_it_said(serve, way):
    server = serve("ForceCommand echo only backups here; exit 3")
    failed = failure(server.config(), way=way)
    assert (failed.step, failed.passing) == ("agent", False)
    assert failed.text == "the login ended before the agent could start: it ended with status 3: only backups here"


def test_a_login_shell_that_refuses_is_named_by_its_status(serve, way):
    failed = failure(serve("ForceCommand /bin/false").config(), way=way)
    assert failed.text == "the login ended before the agent could start: it ended with status 1"


def test_an_agent_that_breaks_while_it_starts_shows_its_last_lines(sshd, way):
    failed = failure(
        sshd.config(), way=way, code=stand_in("def main(word, code_fd):\n    raise RuntimeError('no way')\n")
    )
    assert failed.step == "agent"
    assert failed.text.startswith("the agent has failed to start: it ended with status 1: ")
    assert failed.text.endswith("RuntimeError: no way")


def test_what_a_node_prints_cannot_move_the_cursor(serve, way):
    failed = failure(serve("ForceCommand printf 'a\\033[2Jb\\n\\007c'; exit 3").config(), way=way)
    assert failed.text.endswith(r"a\x1b[2Jb / \x07c")
    assert failed.text.isprintable()


def test_a_shell_that_says_nothing_ends_at_the_deadline(serve, way):
    server = serve("ForceCommand echo hold on; sleep 20")
    started = time.monotonic()
    failed = failure(server.config(), way=way, within_s=2.0)
    assert time.monotonic() - started < 15
    assert (failed.step, failed.passing) == ("agent", True)
    assert failed.text == "the agent has not started in time: hold on"


def test_a_shell_that_prints_without_end_is_left(serve, way):
    failed = failure(serve("ForceCommand cat /dev/zero").config(), way=way)
    assert failed.text.startswith("node prints without end before the agent starts")


def test_a_greeting_with_another_word_is_noise(serve, way):
    failed = failure(serve("ForceCommand echo; echo distlaunch-agent 0123; exit 4").config(), way=way)
    assert failed.step == "agent"


def test_a_server_that_opens_no_session_is_said(serve, way):
    failed = failure(serve("MaxSessions 0").config(), way=way)
    assert failed.step in ("agent", "connect")
    assert "session" in failed.text or "open failed" in failed.text


# --- host keys


def test_an_unknown_key_is_refused_with_the_command_that_adds_it(sshd, way):
    sshd.known_hosts.write_text("")
    failed = failure(sshd.config(), way=way)
    assert (failed.step, failed.passing) == ("host key", False)
    if way == "paramiko":
        assert failed.address == f"127.0.0.1:{sshd.port}"
        assert "its key is not known: ssh-ed25519 SHA256:" in failed.text
        assert f"ssh-keyscan -p {sshd.port} -H 127.0.0.1 >> {sshd.known_hosts}" in failed.hint
        os.system(failed.hint.partition("to trust it: ")[2].partition(";")[0] + " 2>/dev/null")
        works(sshd.config())
    else:
        assert "No ED25519 host key is known for" in failed.text


def test_a_changed_key_is_refused_loudly_with_its_line(sshd, tmp_path, way):
    other = make_key(tmp_path / "other")
    kind, key = Path(f"{other}.pub").read_text().split()[:2]
    sshd.known_hosts.write_text(f"# a comment\n\n[127.0.0.1]:{sshd.port} {kind} {key}\n")
    failed = failure(sshd.config(), way=way)
    assert (failed.step, failed.passing) == ("host key", False)
    assert "KEY HAS CHANGED" in failed.text
    assert f"{sshd.known_hosts}:3" in failed.text
    assert "ssh-keygen -R" in failed.hint


def test_a_revoked_key_is_refused(sshd, way):
    line = sshd.known_hosts.read_text()
    sshd.known_hosts.write_text(f"{line}@revoked * {line.split(' ', 1)[1]}")
    assert failure(sshd.config(), way=way).step == "host key"


def test_hashed_names_are_found(sshd):
    os.system(f"ssh-keygen -q -H -f {sshd.known_hosts} >/dev/null 2>&1")
    assert sshd.known_hosts.read_text().startswith("|1|")
    works(sshd.config())


def test_new_hosts_are_accepted_and_remembered_if_asked_for(sshd, way):
    sshd.known_hosts.unlink()
    works(sshd.config(), way=way, mode="accept-new")
    works(sshd.config(), way=way, mode="strict")
    if way == "paramiko":
        assert sshd.known_hosts.stat().st_mode & 0o777 == 0o600


def test_accepting_new_hosts_takes_no_changed_key(sshd, tmp_path, way):
    kind, key = Path(f"{make_key(tmp_path / 'other')}.pub").read_text().split()[:2]
    sshd.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {kind} {key}\n")
    assert failure(sshd.config(), way=way, mode="accept-new").step == "host key"


def test_any_key_is_taken_if_checks_are_off(sshd, tmp_path, way):
    kind, key = Path(f"{make_key(tmp_path / 'other')}.pub").read_text().split()[:2]
    changed = f"[127.0.0.1]:{sshd.port} {kind} {key}\n"
    sshd.known_hosts.write_text(changed)
    works(sshd.config(), way=way, mode="off")
    assert sshd.known_hosts.read_text() == changed


def test_the_kind_of_key_that_is_known_is_asked_for(serve, way):
    server = serve(key_kinds=("rsa", "ecdsa", "ed25519"))
    for kind in ("ssh-rsa", "ecdsa-sha2-nistp256", "ssh-ed25519"):
        server.know()
        kept = [line for line in server.known_hosts.read_text().splitlines() if f" {kind} " in line]
        server.known_hosts.write_text(kept[0] + "\n")
        works(server.config(), way=way)


def test_several_keys_of_one_kind_may_be_known(sshd, tmp_path):
    kind, key = Path(f"{make_key(tmp_path / 'other')}.pub").read_text().split()[:2]
    known = sshd.known_hosts.read_text()
    sshd.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {kind} {key}\n{known}")
    works(sshd.config())


def test_a_host_of_a_certificate_authority_is_sent_to_openssh(sshd, tmp_path):
    kind, key = Path(f"{make_key(tmp_path / 'authority')}.pub").read_text().split()[:2]
    sshd.known_hosts.write_text(f"@cert-authority * {kind} {key}\n")
    failed = failure(sshd.config())
    assert failed.step == "host key"
    assert f"{sshd.known_hosts}:1" in failed.text
    assert "--ssh-command ssh" in failed.hint


def test_an_alias_names_the_key(sshd, way):
    sshd.know("cluster")
    works(sshd.config("HostKeyAlias cluster"), way=way)


def test_the_user_s_own_setting_counts_if_none_is_given(sshd, way):
    sshd.known_hosts.write_text("")
    works(sshd.config("StrictHostKeyChecking accept-new"), way=way, mode=None)
    assert sshd.known_hosts.read_text()


# --- logins


def test_a_key_that_is_not_taken_is_said(sshd, tmp_path, way):
    other = make_key(tmp_path / "other")
    config = sshd.config()
    config.write_text(config.read_text().replace(str(sshd.key), str(other)))
    failed = failure(config, way=way)
    assert (failed.step, failed.passing) == ("login", False)
    if way == "paramiko":
        assert failed.text == "no key was taken (1 tried)"
        copy = f"ssh-copy-id -p {sshd.port} {sshd.user}@127.0.0.1"
        assert failed.hint == f"is {sshd.user} the user there (--ssh-user)? else: {copy}"
        assert (failed.user, failed.address) == (sshd.user, f"127.0.0.1:{sshd.port}")
    else:
        assert "Permission denied (publickey)" in failed.text


def test_no_key_at_all_is_said(sshd, tmp_path):
    config = sshd.config()
    config.write_text(config.read_text().replace(str(sshd.key), str(tmp_path / "absent")))
    failed = failure(config)
    assert failed.step == "login"
    assert failed.text == f"there is no key to log in with; {tmp_path}/absent is not there"


def test_a_key_with_a_passphrase_is_named(sshd, tmp_path, way):
    locked = make_key(tmp_path / "locked", passphrase="secret")
    config = sshd.config()
    config.write_text(config.read_text().replace(str(sshd.key), str(locked)))
    failed = failure(config, way=way)
    assert failed.step == "login"
    if way == "paramiko":
        assert f"{locked} has a passphrase" in failed.text
        assert failed.hint.startswith(f"ssh-add {locked}")


@pytest.mark.parametrize("only", ["yes", "no"])
def test_a_key_of_the_agent_is_used(sshd, tmp_path, way, only, monkeypatch):
    os.system(f"ssh-keygen -q -p -P '' -N secret -f {sshd.key}")
    with ssh_agent(tmp_path) as (sock, add):
        add(sshd.key, "secret")
        path = sshd.config()
        path.write_text(
            path.read_text()
            .replace("IdentityAgent none", f"IdentityAgent {sock}")
            .replace("IdentitiesOnly yes", f"IdentitiesOnly {only}")
        )
        works(path, way=way)


class ssh_agent:  # noqa: N801 - used as a function
    def __init__(self, tmp_path) -> None:
        self.sock = tmp_path / "agent.sock"

    def __enter__(self):
        self.process = subprocess.Popen(["ssh-agent", "-D", "-a", str(self.sock)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while not self.sock.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self.sock, self._add

    def _add(self, key, passphrase):
        asks = program(self.sock.parent / "askpass", f"#!/bin/sh\necho {passphrase}\n")
        environ = {
            **os.environ,
            "SSH_AUTH_SOCK": str(self.sock),
            "SSH_ASKPASS": str(asks),
            "SSH_ASKPASS_REQUIRE": "force",
        }
        subprocess.run(["ssh-add", "-q", str(key)], env=environ, check=True, stdin=subprocess.DEVNULL)

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


def test_an_agent_that_does_not_answer_holds_up_nobody(sshd, tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        path = sshd.config()
        path.write_text(path.read_text().replace("IdentityAgent none", f"IdentityAgent {tmp_path}/silent"))
        works(path)


def test_a_server_that_takes_only_passwords_is_said(serve):
    failed = failure(serve("PasswordAuthentication yes", "PubkeyAuthentication no").config())
    assert failed.step == "login"
    assert "the server takes no keys, only password" in failed.text


def test_a_server_that_wants_a_password_beside_the_key_is_said(serve):
    server = serve("AuthenticationMethods publickey,password", "PasswordAuthentication yes")
    failed = failure(server.config())
    assert failed.text == "the key is taken, but the server wants more: password"


def test_the_user_and_key_of_the_command_line_beat_the_file(sshd, way):
    config = sshd.config("User nobody-of-this-name")
    config.write_text("\n".join(line for line in config.read_text().splitlines() if "IdentityFile" not in line))
    works(config, way=way, asked=Asked(config=str(config), user=sshd.user, key=str(sshd.key)))
    works(config, way=way, asked=Asked(config=str(config), user="other", key=str(sshd.key)), user=sshd.user)


# --- connections


def test_a_closed_port_is_refused(sshd, way):
    config = sshd.config()
    sshd.close()
    failed = failure(config, way=way)
    assert (failed.step, failed.passing) == ("connect", True)
    assert "onnection refused" in failed.text
    sshd.start()


def test_a_server_that_never_says_a_word_ends_at_the_deadline(sshd, way):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = sshd.config()
        config.write_text(config.read_text().replace(str(sshd.port), str(silent.getsockname()[1])))
        failed = failure(config, way=way, within_s=2.0)
    assert failed.passing
    if way == "paramiko":
        assert failed.step == "connect"
        assert failed.text == "connected, but it has not said that it is an SSH server in time"


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x1b[2J" * 1000, b"x" * 100_000, b"", b"SSH-2.0-x\r\n"]
)
def test_what_is_no_ssh_server_is_said(sshd, said):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                try:
                    peer.sendall(said)
                    time.sleep(0.2)
                except OSError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        config = sshd.config()
        config.write_text(config.read_text().replace(str(sshd.port), str(server.getsockname()[1])))
        failed = failure(config)
        thread.join()
    assert failed.step == "connect"
    assert failed.text.isprintable()


def test_a_name_that_cannot_be_resolved_is_said(sshd, way):
    config = sshd.config()
    config.write_text(config.read_text().replace("HostName 127.0.0.1", "HostName no-such-host.invalid"))
    failed = failure(config, way=way)
    assert failed.step == "resolve"


def test_a_server_that_drops_what_is_too_much_at_once_is_said_to(serve):
    server = serve("MaxStartups 1:100:1", "LoginGraceTime 20")
    with socket.create_connection(("127.0.0.1", server.port)) as first:
        assert first.recv(4) == b"SSH-"
        failed = failure(server.config())
    assert (failed.step, failed.passing) == ("connect", True)
    assert "MaxStartups" in failed.hint or "MaxStartups" in failed.text


def test_a_connection_that_is_cut_in_the_middle_of_the_code_is_said(serve, tmp_path, way):
    # The code is larger than what pipe and window hold, and nobody reads it before the server is killed.
    server = serve(f"ForceCommand touch {tmp_path}/here; sleep 20")
    cut = threading.Thread(target=lambda: (wait_for(tmp_path / "here"), server.close()))
    cut.start()
    failed = failure(server.config(), way=way, code=os.urandom(8 << 20))
    cut.join()
    assert failed.passing
    server.start()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_broken_configuration_is_said(tmp_path, sshd, way):
    config = sshd.config()
    config.write_text("NoSuchKeyword yes\n")
    failed = failure(config, way=way)
    assert not failed.passing
    assert "NoSuchKeyword" in failed.text.lower() or "bad configuration" in failed.text


def test_a_configuration_that_is_not_there_is_said(tmp_path):
    assert "--ssh-config" in failure(tmp_path / "absent").text


# --- proxies


def test_a_jump_host_is_checked_by_its_own_settings(sshd, serve):
    jump = serve(name="jump")
    config = sshd.config("ProxyJump jump")
    jump.known_hosts.write_text("")
    config.write_text(config.read_text() + jump.config(host="jump").read_text())
    failed = failure(config)
    assert failed.step == "host key"
    assert failed.text.startswith("jump host jump: its key is not known")


def test_a_chain_of_jump_hosts_is_followed(sshd, serve):
    first, second = serve(name="first"), serve(name="second")
    config = sshd.config("ProxyJump first,second")
    config.write_text(
        config.read_text() + first.config(host="first").read_text() + second.config(host="second").read_text()
    )
    works(config)
    assert b"Accepted publickey" in first.log.read_bytes()
    assert b"Accepted publickey" in second.log.read_bytes()


def test_jump_hosts_in_a_circle_are_said(sshd, serve):
    config = sshd.config("ProxyJump node")
    failed = failure(config)
    assert "leads round in a circle" in failed.text


def test_a_jump_host_that_reaches_nothing_says_why(sshd, serve):
    jump = serve(name="jump")
    config = sshd.config("ProxyJump jump")
    config.write_text(config.read_text() + jump.config(host="jump").read_text())
    sshd.close()
    failed = failure(config)
    assert failed.step == "connect"
    assert failed.text == "jump host jump does not connect to it: connect failed"
    sshd.start()


def test_one_login_at_a_jump_host_serves_all_nodes_behind_it(sshd, serve):
    jump = serve(name="jump")
    config = sshd.config("ProxyJump jump")
    config.write_text(config.read_text() + jump.config(host="jump").read_text())
    opener = Ssh(
        asked=Asked(config=str(config)), check=HostKeyCheck("strict"), code=stand_in(), pythons=[sys.executable],
        environ=dict(os.environ),
    )  # fmt: skip
    links = []
    threads = [
        threading.Thread(target=lambda: links.append(opener.open(Target(host="node"), BOUND_S))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(links) == 4
    for link in links[:3]:
        link.close()
    links[3].send(b"echo 5\nhello")
    assert End(links[3]).read(5) == b"hello"
    links[3].close()
    assert jump.log.read_bytes().count(b"Accepted publickey") == 1


def test_a_proxy_command_that_fails_says_its_last_words(sshd):
    failed = failure(sshd.config("ProxyCommand echo no way to %h >&2; exit 1"))
    assert failed.step == "connect"
    assert failed.text == "ProxyCommand said: no way to 127.0.0.1"


def test_a_proxy_command_that_hangs_is_ended(sshd):
    failed = failure(sshd.config("ProxyCommand sleep 3600"), within_s=2.0)
    assert failed.step == "connect"


def test_nobody_is_asked_for_a_password(serve, way):
    """Neither way may open the terminal: there is one here, and nothing is written to it."""
    server = serve("PasswordAuthentication yes", "PubkeyAuthentication no")
    config = server.config()
    pid, terminal = pty.fork()
    if pid == 0:
        failed = None
        try:
            reach(config, way=way)
        except Unconnected as exc:
            failed = exc.failure
        os._exit(0 if failed is not None and failed.step == "login" else 1)
    said = b""
    while True:
        try:
            data = os.read(terminal, 1000)
        except OSError:
            break
        if not data:
            break
        said += data
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, said
    assert said == b""
