from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from distlaunch.transport.ssh.login import KeyFile, KeyRing, parse_private_key
from tests.facts import mentions
from tests.sshd import make_key


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_a_key_is_read_with_its_public_half(tmp_path, kind):
    file = KeyFile(str(make_key(tmp_path / "k", kind)))
    assert file.problem is None
    assert file.public == base64.b64decode((tmp_path / "k.pub").read_text().split()[1])


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
@pytest.mark.parametrize("form", ["RFC4716", "PEM", "PKCS8"])
def test_a_passphrase_is_noticed_in_every_format(tmp_path, kind, form):
    path = make_key(tmp_path / "k", kind, "secret")
    if form != "RFC4716" and kind == "rsa":
        command = [
            "ssh-keygen",
            "-q",
            "-p",
            "-m",
            form,
            "-P",
            "secret",
            "-N",
            "secret",
            "-f",
            str(path),
        ]
        subprocess.run(command, check=True)
    file = KeyFile(str(path))
    assert file.is_locked
    assert file.key is None


def test_the_public_half_of_a_locked_key_is_read_without_a_file_beside_it(tmp_path):
    path = make_key(tmp_path / "k", passphrase="secret")
    public = base64.b64decode((tmp_path / "k.pub").read_text().split()[1])
    (tmp_path / "k.pub").unlink()
    assert KeyFile(str(path)).public == public


def test_a_public_key_alone_names_one_of_the_agents(tmp_path):
    path = make_key(tmp_path / "k")
    path.unlink()
    public = base64.b64decode((tmp_path / "k.pub").read_text().split()[1])
    assert KeyFile(str(path)).public == public
    assert KeyFile(str(path)).problem is not None
    assert mentions(KeyFile(str(path)).problem, "not exist")
    assert KeyFile(f"{path}.pub").public == public


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"hello",
        b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n-----END OPENSSH PRIVATE KEY-----\n",
        b"-----BEGIN OPENSSH PRIVATE KEY-----\n=====\n",
        b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n",
    ],
)
def test_an_invalid_key_is_reported_in_one_printable_line(tmp_path, data):
    (tmp_path / "k").write_bytes(data)
    problem = KeyFile(str(tmp_path / "k")).problem
    assert problem
    assert problem.isprintable()
    parse_private_key(data)


def test_read_files_are_not_read_again_but_missing_ones_are(tmp_path):
    ring = KeyRing()
    path = str(tmp_path / "k")
    assert ring.files((path,))[0].problem is not None
    assert mentions(KeyFile(str(path)).problem, "not exist")
    make_key(Path(path))
    first = ring.files((path,))[0]
    assert first.problem is None
    assert ring.files((path,))[0] is first
