"""The launcher's side of Ray's driver, with a fake driver."""

from __future__ import annotations

import os
import select
import sys

import pytest

from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.transport.connection import ConnectError, Target, describe_end
from distlaunch.transport.ray import nodes
from distlaunch.transport.ray.nodes import RayCluster
from tests.facts import mentions

FIRST = """
import json, os, socket, sys
control = socket.socket(fileno=os.dup(0))
lines, pending = [], b""
def ask():
    global pending
    while b"\\n" not in pending:
        pending += control.recv(1 << 16) or sys.exit()
    line, _, pending = pending.partition(b"\\n")
    return json.loads(line)
def tell(**words):
    control.sendall(json.dumps(words).encode() + b"\\n")
def hosts(*names):
    return [{"host": name, "node": f"{number}bcdef0", "bundles": 1} for number, name in enumerate(names)]
call = ask()["call"]
"""


@pytest.fixture
def driver():
    """Return a function that makes a cluster whose driver runs this program after a request."""
    made = []

    def start(script):
        made.append(RayCluster(dict(os.environ), FIRST + script))
        return made[-1]

    yield start
    for each in made:
        each.close()


def until_end(link) -> bytes:
    """Return all bytes of a connection at its end."""
    message = b""
    while (data := link.receive()) is not None:
        message += data
        assert select.select([link], [], [], 20.0)[0], f"the link has not ended after {message!r}"
    return message


def place(places, say=print, **more):
    each = {"CPU": 1.0}
    return places.place_bundles(
        "auto", [each], each=each, strategy="PACK", within_s=20.0, say=say, **more
    )


def test_nodes_of_one_name_are_distinguished_by_their_ids(driver):
    places = driver(
        "tell(call=call, connected=True); tell(call=call, places=hosts('a', 'b', 'a')); ask()"
    )
    assert [each.host for each in place(places)] == ["a-0bcdef", "b", "a-2bcdef"]


def test_it_is_reported_when_the_cluster_is_reached_and_before_anything_is_placed(driver, tmp_path):
    reached = tmp_path / "reached"
    places = driver(
        f"tell(call=call, connected=True)\nwhile not os.path.exists({str(reached)!r}): pass\n"
        "tell(call=call, places=hosts('a')); ask()"
    )
    assert [each.host for each in place(places, when_connected=reached.touch)] == ["a"]


def test_a_cluster_that_is_lost_while_it_places_is_a_matter_of_nodes(driver):
    places = driver(
        "import sys; tell(call=call, connected=True); sys.exit('[2026-01-31 1 E 1 2] a.cc:1: it is gone')"
    )
    with pytest.raises(NodesError, match=r"Ray's driver ended with 1: it is gone"):
        place(places)


def test_a_driver_that_never_reached_a_cluster_is_a_matter_of_what_was_asked(driver):
    places = driver("raise SystemExit('no Ray here')")
    with pytest.raises(ConfigError, match=r"Ray's driver ended with 1: no Ray here"):
        place(places)


def test_an_ended_driver_reports_its_last_lines_on_later_requests(driver):
    places = driver("tell(call=call, places=hosts('a')); raise SystemExit('it is gone')")
    place(places)
    with pytest.raises(ConnectError, match="Ray's driver ended with 1: it is gone"):
        places.open(Target(host="a"), 20.0)


def test_a_problem_after_the_agent_has_started_is_how_it_ended(driver):
    places = driver(
        "tell(call=call, places=hosts('a')); call = ask()['call'];"
        " tell(call=call, opened='0bcdef0', address='10.0.0.1'); tell(call=call, problem='worse', hint=None); ask()"
    )
    place(places)
    link = places.open(Target(host="a"), 20.0)
    until_end(link)
    assert describe_end(link.end()) == "worse"
    link.close()


def test_a_link_ends_when_it_is_known_how_the_agent_has_though_the_driver_holds_it(driver):
    places = driver(
        "tell(call=call, places=hosts('a')); _, [link], _, _ = socket.recv_fds(control, 1 << 16, 1);"
        " tell(call=1, opened='0bcdef0', address='10.0.0.1'); os.write(link, b'last');"
        " tell(call=1, ended=dict(kind='exited', number=3, text='', last_words='')); ask()"
    )
    place(places)
    link = places.open(Target(host="a"), 20.0)
    message = until_end(link)
    assert message == b"last"
    assert mentions(describe_end(link.end()), "status 3")
    link.close()


def test_a_link_ends_no_sooner_than_it_is_known_how_its_driver_has_ended(driver):
    places = driver(
        "tell(call=call, places=hosts('a')); _, [link], _, _ = socket.recv_fds(control, 1 << 16, 1);"
        " tell(call=1, opened='0bcdef0', address='10.0.0.1'); os.read(link, 1); os.kill(os.getpid(), 9)"
    )
    place(places)
    link = places.open(Target(host="a"), 20.0)
    with places._lock:  # whoever waits for the driver's end cannot tell of it now
        link.send(b"x")
        assert places._child.returncode(20.0) == -9
        assert link.receive() == b""
    select.select([link], [], [], 20.0)
    assert link.receive() is None
    assert places.driver_end() == link.end()
    assert mentions(describe_end(link.end()), "driver", "killed", "signal 9")
    link.close()


def test_the_drivers_modules_are_never_first_looked_for_in_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", "/lib", "/other"])
    assert nodes._driver_sys_path() == ["/lib", "/other", str(tmp_path), ""]


def test_a_module_of_the_users_folder_does_not_end_the_driver(driver, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('mine')")
    places = driver("tell(call=call, places=hosts('a')); ask()")
    assert [each.host for each in place(places)] == ["a"]
