"""--lost-after: the longest silence that both sides accept."""

from __future__ import annotations

import signal
import time

from distlaunch.core.protocol.agent_messages import PING_S, SILENCE_S
from tests.cluster.hosts import faults
from tests.cluster.test_ssh_jobs import SHORT, STAYS


def test_a_network_outage_shorter_than_lost_after_does_no_harm(hosts):
    args = [
        "train",
        "--hosts",
        "n1:1,n2:1",
        "--device",
        "cpu",
        *SHORT,
        "--lost-after",
        "120",
        STAYS,
    ]
    running = hosts.start(args, env={"SIGN_DIR": str(hosts.work)})
    running.wait_stdout("all are here")
    time.sleep(1.5 * PING_S)  # for a ping that says so
    workers = {name: {process.pid for process in hosts.processes(name)} for name in ("n1", "n2")}
    faults.cut(hosts, "n2")
    time.sleep(SILENCE_S + 2)  # the silence is what is tested
    faults.cut(hosts, "n2", on=False)
    assert running.process.poll() is None
    assert {
        name: {process.pid for process in hosts.processes(name)} for name in ("n1", "n2")
    } == workers
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=60).returncode == 143
    hosts.assert_clean(within_s=30)
