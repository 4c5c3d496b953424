from __future__ import annotations

import os
from pathlib import Path

from tests.facts import mentions
from tests.process.ssh.conftest import failure, works
from tests.sshd import make_key


def test_an_unknown_key_is_refused_with_the_command_that_adds_it(sshd, way):
    sshd.known_hosts.write_text("")
    failed = failure(sshd.config(), way=way)
    assert (failed.step, failed.passing) == ("host key", False)
    if way == "paramiko":
        assert failed.address == f"127.0.0.1:{sshd.port}"
        assert mentions(failed.text, "not known", "ssh-ed25519", "SHA256")
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
