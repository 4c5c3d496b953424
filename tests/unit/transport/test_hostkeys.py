from __future__ import annotations

import threading

import pytest

from distlaunch.transport.connect_errors import ConnectStepError
from distlaunch.transport.ssh.config import HostSettings
from distlaunch.transport.ssh.host_keys import HostKeyCheck, Unchecked
from distlaunch.transport.ssh.jumps import hop_of
from tests.facts import mentions

KIND, BLOB, OTHER = "ssh-ed25519", b"key", b"other"


def settings(tmp_path, **more) -> HostSettings:
    values = {
        "host": "n1",
        "hostname": "n1",
        "port": 22,
        "user": "me",
        "key_files": (),
        "agent": None,
        "user_known_hosts": (str(tmp_path / "ssh" / "known_hosts"),),
        **more,
    }
    return HostSettings(**values)


def test_a_new_key_is_remembered_in_a_private_file_of_a_private_folder(tmp_path):
    host = settings(tmp_path)
    HostKeyCheck("accept-new").check(host, KIND, BLOB)
    file = tmp_path / "ssh" / "known_hosts"
    assert file.read_text() == "n1 ssh-ed25519 a2V5\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    HostKeyCheck("strict").check(host, KIND, BLOB)
    with pytest.raises(ConnectStepError, match="KEY HAS CHANGED"):
        HostKeyCheck("accept-new").check(host, KIND, OTHER)


def test_a_name_is_hashed_if_the_user_hashes_names(tmp_path):
    host = settings(tmp_path, hash_names=True, port=2222)
    HostKeyCheck("accept-new").check(host, KIND, BLOB)
    assert (tmp_path / "ssh" / "known_hosts").read_text().startswith("|1|")
    HostKeyCheck("strict").check(host, KIND, BLOB)


def test_a_file_without_a_last_newline_is_not_spoiled(tmp_path):
    (tmp_path / "ssh").mkdir()
    (tmp_path / "ssh" / "known_hosts").write_text("n0 ssh-ed25519 AAAA")
    HostKeyCheck("accept-new").check(settings(tmp_path), KIND, BLOB)
    assert (
        tmp_path / "ssh" / "known_hosts"
    ).read_text() == "n0 ssh-ed25519 AAAA\nn1 ssh-ed25519 a2V5\n"


def test_many_new_hosts_at_once_are_all_remembered(tmp_path):
    check = HostKeyCheck("accept-new")
    threads = [
        threading.Thread(
            target=check.check, args=(settings(tmp_path, hostname=f"n{number}"), KIND, BLOB)
        )
        for number in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (tmp_path / "ssh" / "known_hosts").read_text().splitlines()
    assert sorted(lines) == sorted(f"n{number} ssh-ed25519 a2V5" for number in range(32))


def test_the_same_new_host_twice_is_remembered_once_in_one_launcher(tmp_path):
    check = HostKeyCheck("accept-new")
    check.check(settings(tmp_path), KIND, BLOB)
    check.check(settings(tmp_path), KIND, BLOB)
    assert (tmp_path / "ssh" / "known_hosts").read_text().count("\n") == 1
    with pytest.raises(ConnectStepError, match="KEY HAS CHANGED"):
        check.check(settings(tmp_path), KIND, OTHER)


def test_a_file_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "ssh").write_text("no folder")
    with pytest.raises(ConnectStepError, match="added"):
        HostKeyCheck("accept-new").check(settings(tmp_path), KIND, BLOB)


def test_a_key_known_without_the_port_will_do_and_another_there_proves_nothing(tmp_path):
    HostKeyCheck("accept-new").check(settings(tmp_path), KIND, BLOB)
    at_port = settings(tmp_path, port=2222)
    HostKeyCheck("strict").check(at_port, KIND, BLOB)
    with pytest.raises(ConnectStepError, match="not known"):
        HostKeyCheck("strict").check(at_port, KIND, OTHER)


def test_the_hint_is_the_command_for_this_host_and_port(tmp_path):
    with pytest.raises(ConnectStepError) as caught:
        HostKeyCheck("strict").check(settings(tmp_path, port=2222), KIND, BLOB)
    assert f"ssh-keyscan -p 2222 -H n1 >> {tmp_path}/ssh/known_hosts" in caught.value.hint


@pytest.mark.parametrize(
    ("mode", "setting", "holds"),
    [
        ("strict", "no", "strict"),
        ("off", "yes", "off"),
        (None, "no", "off"),
        (None, "off", "off"),
        (None, "accept-new", "accept-new"),
        (None, "ask", "strict"),
        (None, "yes", "strict"),
        (None, None, "strict"),
    ],
)
def test_the_option_beats_the_setting(tmp_path, mode, setting, holds):
    assert HostKeyCheck(mode).mode(settings(tmp_path, check=setting)) == holds


@pytest.mark.parametrize(
    ("text", "hop"),
    [
        ("bastion", (None, "bastion", None)),
        ("me@bastion:2222", ("me", "bastion", 2222)),
        ("me@x@bastion", ("me@x", "bastion", None)),
        ("ssh://me@bastion:2222", ("me", "bastion", 2222)),
        ("[fd00::1]:22", (None, "fd00::1", 22)),
        ("fd00::1", (None, "fd00::1", None)),
    ],
)
def test_a_jump_host_is_read(text, hop):
    assert hop_of(text) == hop


@pytest.mark.parametrize("text", ["", "me@", "bastion:port"])
def test_an_invalid_jump_host_is_refused(text):
    with pytest.raises(ConnectStepError, match="ProxyJump"):
        hop_of(text)


@pytest.mark.parametrize(
    ("mode", "setting", "why"),
    [
        ("off", None, "--ssh-host-keys off"),
        (None, "no", "StrictHostKeyChecking no"),
        (None, "off", "StrictHostKey"),
    ],
)
def test_keys_that_are_not_checked_are_reported_once(tmp_path, mode, setting, why):
    reported: list[str] = []
    check = HostKeyCheck(mode, Unchecked(reported.append))
    for blob in (BLOB, OTHER):
        check.check(settings(tmp_path, check=setting), KIND, blob)
    [text] = reported
    assert mentions(text, "not checked")
    assert why in text


def test_keys_that_are_checked_are_not_worth_a_word(tmp_path):
    check = HostKeyCheck("accept-new", Unchecked(pytest.fail))
    check.check(settings(tmp_path, check="no"), KIND, BLOB)
