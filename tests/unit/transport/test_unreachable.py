from __future__ import annotations

from distlaunch.transport.connect_errors import SSH_PORT, ConnectFailure, KeyScan
from distlaunch.transport.unreachable import render


def refused(number: int) -> ConnectFailure:
    return ConnectFailure(
        host=f"node{number}",
        address=f"10.0.0.{number}:22",
        user="me",
        step="connect",
        text="connection refused",
    )


def unknown(number: int, *, port: int = SSH_PORT) -> ConnectFailure:
    scan = KeyScan(host=f"n{number}", port=port)
    return ConnectFailure(
        host=f"n{number}",
        address=f"10.0.0.{number}:22",
        user="me",
        step="host key",
        text=f"its key is not known: ssh-ed25519 SHA256:abc{number}",
        hint=f"to trust it: {scan.command()}; or so",
        scan=scan,
        passing=False,
    )


def test_a_row_for_each_with_its_columns():
    assert render(
        [refused(1), ConnectFailure(host="x", step="resolve", text="no such name", hint="add it")]
    ) == (
        "  HOST   ADDRESS      USER  STEP     WHAT\n"
        "  node1  10.0.0.1:22  me    connect  connection refused\n"
        "  x                         resolve  no such name\n"
        "  hint: add it"
    )


def test_columns_that_nobody_fills_are_left_out():
    assert (
        render([ConnectFailure(host="x", step="script", text="not there")])
        == "  HOST  STEP    WHAT\n  x     script  not there"
    )


def test_many_that_fail_alike_are_named_in_one_line():
    lines = render([refused(number) for number in range(1, 65)]).splitlines()
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "  and 44 more like node1: node[21-64]"


def test_every_kind_of_failure_is_shown_and_the_commonest_first():
    rows = [refused(number) for number in range(1, 65)]
    lines = render(
        [unknown(99), *rows, ConnectFailure(host="z", step="python", text="z has Python 3.8")]
    ).splitlines()
    assert lines[1].startswith("  node1 ")
    assert "  and 46 more like node1: node[19-64]" in lines
    assert any(line.startswith("  n99 ") for line in lines)
    assert any("z has Python 3.8" in line for line in lines)
    assert len(lines) == 1 + 20 + 1 + 1


def test_the_same_with_another_name_or_key_in_it_is_alike():
    rows = [
        ConnectFailure(host=f"n{n}", step="python", text=f"n{n} has Python 3.8", hint="--python")
        for n in range(30)
    ]
    assert "and 10 more like n0: n[20-29]" in render(rows)
    assert render(rows).count("hint:") == 1
    assert "and 10 more like n0" in render([unknown(number) for number in range(30)])


def test_keys_of_many_hosts_are_scanned_by_one_command():
    text = render([unknown(1), unknown(2), unknown(3)])
    assert text.endswith(
        "\n  hint: to trust it: ssh-keyscan -H n1 n2 n3 >> ~/.ssh/known_hosts; or so"
    )
    assert text.count("hint:") == 1


def test_other_hints_that_differ_by_the_host_are_given_once():
    rows = [
        ConnectFailure(
            host=f"n{n}", step="login", text="no key was taken", hint=f"ssh-copy-id me@n{n}"
        )
        for n in range(3)
    ]
    assert render(rows).endswith("\n  hint: ssh-copy-id me@n0 (for n0; likewise for 2 more)")


def test_more_kinds_than_rows_are_counted():
    rows = [
        ConnectFailure(host=f"n{n}", step="agent", text=f"trouble of kind {chr(97 + n)}")
        for n in range(25)
    ]
    lines = render(rows).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 5 more: n[20-24]"


def test_nobody_failed():
    assert render([]) == ""
