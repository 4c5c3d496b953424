from __future__ import annotations

import subprocess

import pytest

from distlaunch.transport.ssh.host_keys import (
    KnownHosts,
    hashed_name,
    judge,
    lookup_name,
    names_match,
    parse,
)

ED, RSA = "ssh-ed25519", "ssh-rsa"


def lines(text: str):
    return list(parse(text.splitlines(), "f"))


def verdict(text: str, kind: str = ED, key: str = "AAAA", name: str = "n1") -> str:
    hosts = KnownHosts([])
    hosts.add(lines(text))
    return judge(hosts.of(name), kind, key)[0]


def test_lines_are_read_with_their_numbers_and_the_rest_is_passed_over():
    read = lines(
        "# comment\n\nn1,10.0.0.1 ssh-ed25519 AAAA me@here\nbroken line\n@revoked * ssh-rsa BBBB\n"
    )
    assert [(one.line, one.names, one.marker, one.kind, one.key) for one in read] == [
        (3, "n1,10.0.0.1", "", ED, "AAAA"),
        (5, "*", "@revoked", RSA, "BBBB"),
    ]
    assert read[0].place == "f:3"


@pytest.mark.parametrize(
    ("host", "port", "name"),
    [("N1", 22, "n1"), ("n1", 2222, "[n1]:2222"), ("fd00::1", 22, "fd00::1")],
)
def test_a_port_other_than_22_is_part_of_the_name(host, port, name):
    assert lookup_name(host, port) == name


@pytest.mark.parametrize(
    ("names", "name", "matches"),
    [
        ("n1", "n1", True),
        ("n1", "n11", False),
        ("N1", "n1", True),
        ("a,n1,b", "n1", True),
        ("n?", "n1", True),
        ("n*.example.com", "n1.example.com", True),
        ("*.example.com,!n1.example.com", "n1.example.com", False),
        ("!n1.example.com,*.example.com", "n2.example.com", True),
        ("[n1]:2222", "[n1]:2222", True),
        ("[n*]:2222", "[n1]:2222", True),
        ("[n1]:2222", "n", False),
        ("n[12]", "n1", False),
        ("*", "anything", True),
        ("!n1", "n2", False),
    ],
)
def test_names_patterns_and_exclusions(names, name, matches):
    assert names_match(names, name) == matches


def test_hashed_names_are_as_ssh_keygen_makes_them(tmp_path):
    file = tmp_path / "known_hosts"
    key = "AAAAC3NzaC1lZDI1NTE5AAAAIJXVfmKVYtLqBSFkgP8dZSSuxkVbFTBfMhNlTaFvtTWl"
    file.write_text(f"n1 {ED} {key}\n[n2]:2222 {ED} {key}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    assert file.read_text().count("|1|") == 2
    hosts = KnownHosts([str(file), str(tmp_path / "absent")])
    assert [one.line for one in hosts.of("n1")] == [1]
    assert [one.line for one in hosts.of("[n2]:2222")] == [2]
    assert hosts.of("n2") == []


def test_a_hash_that_we_made_is_found_by_ssh_keygen(tmp_path):
    file = tmp_path / "known_hosts"
    key = "AAAAC3NzaC1lZDI1NTE5AAAAIJXVfmKVYtLqBSFkgP8dZSSuxkVbFTBfMhNlTaFvtTWl"
    file.write_text(f"{hashed_name('[n1]:22022', bytes(20))} {ED} {key}\n")
    found = subprocess.run(
        ["ssh-keygen", "-F", "[n1]:22022", "-f", file], check=True, capture_output=True, text=True
    )
    assert "line 1" in found.stdout


@pytest.mark.parametrize(
    "names", ["|1|", "|1|x|y", "|1|AAAA", "|2|AAAA|AAAA", "|1|====|====", "||||||"]
)
def test_broken_hashes_match_nothing(names):
    hosts = KnownHosts([])
    hosts.add(lines(f"{names} {ED} AAAA"))
    assert hosts.of("n1") == []


def test_the_key_of_one_of_several_lines_is_known():
    assert verdict(f"n1 {ED} BBBB\nn1 {ED} AAAA\n") == "known"
    assert verdict(f"n1 {RSA} BBBB\nn* {ED} AAAA\n") == "known"


def test_another_key_of_the_same_kind_is_a_change_and_the_line_is_named():
    hosts = KnownHosts([])
    hosts.add(lines(f"n1 {RSA} CCCC\nn1 {ED} BBBB\n"))
    message, line = judge(hosts.of("n1"), ED, "AAAA")
    assert (message, line.place) == ("changed", "f:2")


def test_a_key_of_another_kind_is_no_change_and_not_unknown():
    assert verdict(f"n1 {RSA} BBBB\n") == "other types"


def test_a_revoked_key_is_revoked_wherever_it_is_named():
    assert verdict(f"n1 {ED} AAAA\n@revoked * {ED} AAAA\n") == "revoked"
    assert verdict(f"n1 {ED} AAAA\n@revoked * {ED} BBBB\n") == "known"


def test_an_authority_vouches_only_where_no_key_is_known():
    assert verdict(f"@cert-authority * {ED} BBBB\n") == "certified"
    assert verdict(f"@cert-authority * {ED} BBBB\nn1 {ED} AAAA\n") == "known"
    assert verdict(f"@cert-authority * {ED} AAAA\n") == "certified"


def test_nothing_known_is_unknown():
    assert verdict("") == "unknown"
    assert verdict(f"n2 {ED} AAAA\n") == "unknown"


def test_an_added_example_is_found():
    hosts = KnownHosts([])
    assert hosts.of("n1") == []
    hosts.add(lines(f"n1 {ED} AAAA"))
    assert len(hosts.of("n1")) == 1
