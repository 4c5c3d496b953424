from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.planning.train_options import TrainOptions
from distlaunch.transport import route
from distlaunch.transport.child_process import KillSwitch
from distlaunch.transport.connection import Target


@pytest.fixture
def ways():
    """Record the arguments of connectors, and open nothing."""
    noted = {}

    def way(name):
        class Way:
            def __init__(self, *args, **values) -> None:
                noted[name] = (args, values)

            def open(self, target, within_s):
                return name, target.host, within_s

        return Way

    connectors = route.Connectors(
        ssh=way("paramiko"),
        ssh_command=way("openssh"),
        local=lambda target, within_s, **_: ("beside", target.host, within_s),
    )
    return SimpleNamespace(made=noted, connectors=connectors)


def opened(ways, target: Target, **options):
    open_connection = route.opener(
        TrainOptions(**options), {}, KillSwitch(), connectors=ways.connectors
    )
    return open_connection(target, 5.0)


def test_this_machine_needs_no_network(ways):
    assert opened(ways, Target(host="n1", here=True)) == ("beside", "n1", 5.0)
    assert opened(ways, Target(host="n1", here=True), ssh_command="ssh") == ("beside", "n1", 5.0)


def test_others_are_reached_by_paramiko_unless_a_command_is_given(ways):
    assert opened(ways, Target(host="n1")) == ("paramiko", "n1", 5.0)
    assert opened(ways, Target(host="n1"), ssh_command="ssh -v") == ("openssh", "n1", 5.0)
    assert ways.made["openssh"][0] == ("ssh -v",)


def test_the_options_of_ssh_are_passed_on(ways):
    opened(ways, Target(host="n1"), ssh_user="me", ssh_port=2222, ssh_key="k", ssh_config="c")
    asked = ways.made["paramiko"][1]["options"]
    assert (asked.user, asked.port, asked.key, asked.config) == ("me", 2222, "k", "c")


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, None),
        ({"ssh_host_keys": "off"}, "off"),
        ({"ssh_host_keys": "strict", "given": {"ssh_host_keys": "--ssh-host-keys"}}, "strict"),
    ],
)
def test_host_keys_are_the_users_own_business_unless_said(ways, options, mode):
    opened(ways, Target(host="n1"), ssh_command="ssh", **options)
    assert ways.made["openssh"][1]["host_keys"] == mode


def test_the_launchers_interpreter_is_tried_first_and_the_workers_next(ways):
    opened(ways, Target(host="n1"), python="/opt/python")
    assert ways.made["paramiko"][1]["pythons"] == [sys.executable, "/opt/python"]
    opened(ways, Target(host="n1"), python="python3")
    assert ways.made["paramiko"][1]["pythons"] == [sys.executable]


def test_an_unknown_command_is_refused_at_once():
    with pytest.raises(ConfigError):
        route.opener(TrainOptions(ssh_command="ssh 'x"), {}, KillSwitch())


def test_a_command_that_checks_no_host_keys_is_reported_once(ways):
    reported: list[str] = []
    options = TrainOptions(ssh_host_keys="off", ssh_command="ssh")
    open_connection = route.opener(
        options, {}, KillSwitch(), note=reported.append, connectors=ways.connectors
    )
    open_connection(Target(host="n0", here=True), 5.0)
    assert not reported
    open_connection(Target(host="n1"), 5.0)
    open_connection(Target(host="n2"), 5.0)
    assert len(reported) == 1
    assert "--ssh-host-keys off" in reported[0]
