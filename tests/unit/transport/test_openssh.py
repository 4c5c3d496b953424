from __future__ import annotations

from itertools import pairwise

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.transport.connection import Target
from distlaunch.transport.ssh.config import SshOptions
from distlaunch.transport.ssh.openssh import SshCommandConnector, parse_ssh_error
from tests.facts import mentions


def made(command="ssh", *, host_keys="strict", **asked):
    return SshCommandConnector(
        command, options=SshOptions(**asked), host_keys=host_keys, code=b"", pythons=(), environ={}
    )


def test_nobody_is_asked_and_nothing_is_forwarded():
    words = made().options(Target(host="n1"))
    assert words[:3] == ["-T", "-a", "-x"]
    settings = [word for flag, word in pairwise(words) if flag == "-o"]
    assert {
        "BatchMode=yes",
        "ClearAllForwardings=yes",
        "ControlMaster=no",
        "ControlPath=none",
        "RemoteCommand=none",
    } <= set(settings)
    assert "StrictHostKeyChecking=yes" in settings


def test_options_are_passed_on_and_the_hosts_own_win():
    words = made(user="me", port=2222, key="/k", config="/c", host_keys="off").options(
        Target(host="n1", user="you", port=9)
    )
    assert words[-8:] == ["-F", "/c", "-p", "9", "-l", "you", "-i", "/k"]
    assert "UserKnownHostsFile=/dev/null" in words
    assert "-l" not in made().options(Target(host="n1"))


def test_without_a_choice_the_users_settings_decide():
    assert not [
        word
        for word in made(host_keys=None).options(Target(host="n1"))
        if "StrictHostKeyChecking" in word
    ]


@pytest.mark.parametrize("command", ["ssh 'x", "", "  "])
def test_an_unknown_command_is_refused(command):
    with pytest.raises(ConfigError, match="--ssh-command"):
        made(command)


@pytest.mark.parametrize(
    ("message", "step", "passing"),
    [
        ("ssh: Could not resolve hostname n1: Name or service not known", "resolve", False),
        ("ssh: connect to host n1 port 22: Connection refused", "connect", True),
        ("ssh: connect to host n1 port 22: No route to host", "connect", True),
        ("kex_exchange_identification: Connection closed by remote host", "connect", True),
        ("Unable to negotiate with 10.0.0.1 port 22: no matching cipher found", "connect", False),
        ("me@n1: Permission denied (publickey,password).", "login", False),
        (
            "Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures",
            "login",
            False,
        ),
        ("Host key verification failed.", "host key", False),
        ("/home/me/.ssh/config: line 3: Bad configuration option: nonsense", "connect", False),
        ("Bad owner or permissions on /home/me/.ssh/config", "connect", False),
        ("", "connect", True),
    ],
)
def test_each_failure_of_ssh_has_its_step(message, step, passing):
    failure = parse_ssh_error(message.encode(), host="n1")
    assert (failure.step, failure.passing) == (step, passing)
    assert failure.text == (message or "ssh failed without a message")


def test_a_changed_key_is_reported_loudly_with_its_line():
    message = (
        "@@@@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@@@@@@@@\n"
        "Offending ED25519 key in /home/me/.ssh/known_hosts:7\n  remove with:\n"
        "Host key for [n1]:2222 has changed and you have requested strict checking.\nHost key verification failed.\n"
    )
    failure = parse_ssh_error(message.encode(), host="alias")
    assert mentions(failure.text, "CHANGED", "/home/me/.ssh/known_hosts:7")
    assert (
        "ssh-keygen -R '[n1]:2222', then ssh-keyscan -p 2222 -H n1 >> ~/.ssh/known_hosts"
        in failure.hint
    )


def test_an_unknown_key_has_the_command_that_adds_it():
    message = "No ED25519 host key is known for n1 and you have requested strict checking.\nHost key verification failed.\n"
    failure = parse_ssh_error(message.encode(), host="alias")
    assert failure.text == message.splitlines()[0]
    assert mentions(failure.hint, "ssh-keyscan -H n1 >> ~/.ssh/known_hosts")


def test_hostile_words_are_made_printable_and_short():
    assert parse_ssh_error(b"\x1b[2J" + b"x" * 10_000, host="n1").text.isprintable()
    assert len(parse_ssh_error(b"x" * 10_000, host="n1").text) < 400
