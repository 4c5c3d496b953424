"""A login shell that waits before the agent can start: the job says which step was reached."""

from __future__ import annotations

from tests.facts import mentions


def test_a_node_whose_login_shell_waits_is_reported_as_logged_in(serve, distlaunch):
    server = serve("ForceCommand sleep 30")  # which nobody ends: sshd leaves it running
    (distlaunch.work / "t.py").write_text("")
    words = [
        "--hosts",
        "node:1",
        "--ssh-config",
        str(server.config()),
        "--device",
        "cpu",
        "--join-timeout",
        "3",
    ]
    result = distlaunch.train(*words, "t.py")
    assert result.returncode == 69
    assert mentions(result.stderr, "logged in", "3 s")
    assert mentions(result.stderr, "login shell")
    assert "not reached" not in result.stderr
