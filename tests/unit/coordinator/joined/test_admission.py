from __future__ import annotations

import socket
import threading

from distlaunch.coordinator.joined.admission import CoordinatorConnector
from distlaunch.core.model.record import replace
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.transport.tcp_listener import Listener
from tests.unit.coordinator.joined.joined_launcher import Signals, planner
from tests.unit.coordinator.remote_agents import WITHIN_S


def test_of_several_ports_the_one_that_has_answered_is_named(tmp_path):
    joiner = planner(tmp_path)
    job_identity = JobIdentity(release="1", job_key="")
    welcome = p.Welcome(job_id="j", rank=1)
    listener = Listener(
        "127.0.0.1",
        (0,),
        job_identity=job_identity,
        owner="j",
        admit=lambda call: welcome,
        log=print,
    )
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        silent = taken.getsockname()[1]
        joiner.rendezvous = replace(joiner.rendezvous, ports=(silent, listener.port))
        signals = Signals()
        connect = CoordinatorConnector(
            joiner,
            job_identity,
            join_timeout_s=WITHIN_S,
            say=lambda text, *, level: print(level, text),
            signals=signals,
        )
        assert connect.coordinator == f"node 0 (127.0.0.1:{silent})"
        links = []
        thread = threading.Thread(target=lambda: links.append(connect()[0]))
        thread.start()
        admitted = []
        while thread.is_alive():
            admitted += listener.ready()
            thread.join(0.01)
    assert connect.coordinator == f"node 0 (127.0.0.1:{listener.port})"
    for link in (*links, *(link for _, link in admitted)):
        link.close()
    listener.close()
    signals.free()
