from __future__ import annotations

import getpass
import os
import pwd
import socket

import pytest

from distlaunch.transport.connect_errors import ConnectStepError
from distlaunch.transport.ssh import config as sshconfig
from distlaunch.transport.ssh.config import (
    SshOptions,
    home_of,
    parse,
    read_settings,
    settings_of,
    with_tokens,
)

HOME = "/home/me"


def made(text: str, *, host: str = "n1", user=None, port=None, key=None, environ=None):
    return settings_of(
        host, parse(text), user=user, port=port, key=key, home=HOME, environ=environ or {}
    )


def test_a_keyword_may_come_several_times_and_in_any_case():
    assert parse("host n1\nIdentityFile a\nidentityfile b c\n") == {
        "host": ["n1"],
        "identityfile": ["a", "b c"],
    }


def test_without_a_word_the_defaults_are_openssh_s():
    settings = made("", environ={"SSH_AUTH_SOCK": "/run/agent"})
    assert (settings.hostname, settings.port, settings.user) == ("n1", 22, getpass.getuser())
    assert f"{HOME}/.ssh/id_ed25519" in settings.key_files
    assert settings.user_known_hosts == (f"{HOME}/.ssh/known_hosts", f"{HOME}/.ssh/known_hosts2")
    assert settings.agent == "/run/agent"
    assert (settings.jumps, settings.command, settings.key_alias, settings.check) == (
        None,
        None,
        None,
        None,
    )


def test_the_hosts_own_user_and_port_beat_the_files():
    settings = made("user cfg\nport 2222\n", user="me", port=22022)
    assert (settings.user, settings.port) == ("me", 22022)


def test_a_named_key_comes_first():
    settings = made("identityfile ~/.ssh/other\n", key="~/k")
    assert settings.key_files == (f"{HOME}/k", f"{HOME}/.ssh/other")
    assert settings.named_key == f"{HOME}/k"


def test_tokens_variables_and_tildes_in_paths_are_replaced():
    text = "hostname 10.0.0.7\nuser bob\nport 2222\nidentityfile ~/keys/%r@%h:%p/%n\nidentityfile ${KEYS}/a\nidentityfile %d/b\n"
    settings = made(text, environ={"KEYS": "/keys"})
    assert settings.key_files == (f"{HOME}/keys/bob@10.0.0.7:2222/n1", "/keys/a", f"{HOME}/b")


def test_a_variable_that_names_itself_is_replaced_once():
    assert made("identityfile /x${A}\n", environ={"A": "${A}"}).key_files == ("/x${A}",)


def test_identity_files_may_have_blanks_and_none_means_none():
    assert made("identityfile /a b/key\n").key_files == ("/a b/key",)
    assert made("identityfile none\n").key_files == ()


@pytest.mark.parametrize(
    ("text", "agent"),
    [
        ("identityagent none\n", None),
        ("identityagent SSH_AUTH_SOCK\n", "/run/agent"),
        ("identityagent $OTHER\n", "/run/other"),
        ("identityagent ${OTHER}\n", "/run/other"),
        ("identityagent ~/agent.sock\n", f"{HOME}/agent.sock"),
    ],
)
def test_the_agent_may_be_another_or_none(text, agent):
    assert made(text, environ={"SSH_AUTH_SOCK": "/run/agent", "OTHER": "/run/other"}).agent == agent


def test_proxies():
    settings = made("hostname n1.lan\nproxycommand nc -X 5 %h %p 100%%\n")
    assert settings.command == "nc -X 5 n1.lan 22 100%"
    settings = made("proxyjump a,b\nproxycommand nc %h %p\n")
    assert (settings.jumps, settings.command) == ("a,b", None)
    assert made("proxycommand none\nproxyjump none\n").command is None


def test_what_else_is_read():
    settings = made(
        "stricthostkeychecking accept-new\nhashknownhosts yes\nhostkeyalias cluster\nconnecttimeout 7\ncompression yes\n"
        "bindaddress 10.0.0.1\naddressfamily inet6\nidentitiesonly yes\nuserknownhostsfile /a ~/b\nglobalknownhostsfile none\n"
        "ciphers aes128-ctr,aes256-ctr\nkexalgorithms +x\n"
    )
    assert settings.check == "accept-new"
    assert settings.hash_names
    assert settings.key_alias == "cluster"
    assert settings.connect_timeout_s == 7
    assert settings.compression
    assert settings.bind_address == "10.0.0.1"
    assert settings.family == socket.AF_INET6
    assert settings.only_key_files
    assert settings.user_known_hosts == ("/a", f"{HOME}/b")
    assert settings.global_known_hosts == ()
    assert settings.algorithms == {"ciphers": ("aes128-ctr", "aes256-ctr")}


@pytest.mark.parametrize("text", ["port x\n", "connecttimeout 1e3\n"])
def test_a_number_that_is_none_is_reported(text):
    with pytest.raises(ConnectStepError, match="number"):
        made(text)


def test_unknown_tokens_stay():
    assert with_tokens("%h %% %x %", {"h": "n1"}) == "n1 % %x %"
    assert with_tokens("%%h", {"h": "n1"}) == "%h"
    assert with_tokens("%%%h", {"h": "n1"}) == "%n1"


# --- where they come from


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "me" / ".ssh").mkdir(parents=True)
    entry = pwd.struct_passwd(("me", "x", 1, 1, "", str(tmp_path / "account"), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: entry)
    return tmp_path / "me"


def environ(home, **more):
    return {"HOME": str(home), "PATH": os.environ["PATH"], **more}


def test_home_counts_only_where_it_has_a_folder_of_ssh(home, tmp_path):
    assert home_of({"HOME": str(home)}) == str(home)
    assert home_of({"HOME": str(tmp_path)}) == str(tmp_path / "account")
    assert home_of({}) == str(tmp_path / "account")


def test_openssh_is_asked_where_it_is_there(home):
    config = home / ".ssh" / "config"
    (home / ".ssh" / "more").write_text(
        "Host n*\n  Port 2200\n  UserKnownHostsFile ~/.ssh/cluster\n"
    )
    config.write_text(f"Include {home}/.ssh/more\nMatch host n1 user bob\n  HostName 10.9.9.9\n")
    settings = read_settings(
        "n1", user="bob", port=None, options=SshOptions(), environ=environ(home)
    )
    assert (settings.hostname, settings.port, settings.user) == ("10.9.9.9", 2200, "bob")
    settings = read_settings(
        "n1", user=None, port=None, options=SshOptions(user="alice", port=1), environ=environ(home)
    )
    assert (settings.hostname, settings.port, settings.user) == ("n1", 1, "alice")
    settings = read_settings(
        "n1", user="bob", port=5, options=SshOptions(user="alice", port=1), environ=environ(home)
    )
    assert (settings.port, settings.user) == (5, "bob")


def test_another_file_replaces_the_users(home, tmp_path):
    (home / ".ssh" / "config").write_text("Host n1\n  Port 1\n")
    (tmp_path / "other").write_text("Host n1\n  User zoe\n")
    asked = SshOptions(config=str(tmp_path / "other"))
    settings = read_settings("n1", user=None, port=None, options=asked, environ=environ(home))
    assert (settings.port, settings.user) == (22, "zoe")


def test_paramiko_reads_where_openssh_is_not(home):
    (home / ".ssh" / "config").write_text(
        "Host n*\n  HostName %h.lan\n  Port 2200\n  IdentityFile ~/.ssh/a\n  IdentityFile ~/.ssh/b\n  ProxyJump bastion\n"
    )
    settings = read_settings(
        "n1", user="bob", port=None, options=SshOptions(), environ=environ(home, PATH="/nowhere")
    )
    assert (settings.hostname, settings.port, settings.user) == ("n1.lan", 2200, "bob")
    assert [os.path.basename(path) for path in settings.key_files] == ["a", "b"]
    assert settings.jumps == "bastion"


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "-G"])
def test_a_host_is_never_an_option(home, host):
    with pytest.raises(ConnectStepError, match="dash"):
        read_settings(host, user=None, port=None, options=SshOptions(), environ=environ(home))


def test_a_broken_file_is_reported_with_its_line(home):
    (home / ".ssh" / "config").write_text("Nonsense yes\n")
    with pytest.raises(ConnectStepError, match=r"config.*line 1|bad configuration"):
        read_settings("n1", user=None, port=None, options=SshOptions(), environ=environ(home))


def test_an_ssh_that_hangs_is_not_waited_for(home, tmp_path, monkeypatch):
    slow = tmp_path / "bin" / "ssh"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sshconfig, "_COMMAND_S", 0.2)
    with pytest.raises(ConnectStepError, match="ssh -G"):
        read_settings(
            "n1",
            user=None,
            port=None,
            options=SshOptions(),
            environ=environ(home, PATH=f"{slow.parent}:/usr/bin:/bin"),
        )
