"""Workers whose stdout has the reason of their end."""

from __future__ import annotations

import pytest

from distlaunch.diagnosis.first_cause import diagnose
from distlaunch.diagnosis.report import render_report


def one(end_of, tail="", **fields):
    return diagnose([end_of(0, tail, **fields)], world_size=1)


def test_traceback_on_stdout_is_the_cause(end_of):
    stdout = 'Traceback (most recent call last):\n  File "/p/t.py", line 7, in step\n    go()\nKeyError: 1\n'
    found = one(end_of, stdout_tail=f"epoch 1\n{stdout}", returncode=3)
    assert (found.cause.exception_type, found.cause.frame) == ("KeyError", "t.py:7 in step")


def test_last_line_on_stdout_before_the_exit_is_the_cause(end_of):
    found = one(end_of, stdout_tail="epoch 1\nloss is nan, stopping\n")
    assert found.cause.message == "loss is nan, stopping"
    assert found.cause.stream == "stdout"
    text = render_report(
        found,
        job_id="a",
        world_size=1,
        attempt=0,
        restarts=0,
        max_restarts=0,
        elapsed_s=1.0,
        run_dir="/r",
        many_hosts=False,
    )
    assert "last lines on stdout:" in text


@pytest.mark.parametrize(
    "line",
    [
        "ERROR:root:no shards in /data",
        "2026-11-29 12:00:00,123 - train - CRITICAL - no shards in /data",
        "[2026-11-29 12:00:00,123][train][ERROR] - no shards in /data",
        "2026-11-29 12:00:00.123 | ERROR    | __main__:main:12 - no shards in /data",
        "E1129 12:00:00.123456 4711 train.py:12] no shards in /data",
        '{"event": "no shards in /data", "level": "error"}',
        'level=error msg="no shards in /data"',
    ],
)
@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_logged_error_is_the_cause_whatever_came_after_it(end_of, line, stream):
    text = f"INFO:root:epoch 1\n{line}\nINFO:root:closing\nINFO:root:bye\n"
    fields = {"stdout_tail": text} if stream == "stdout" else {"tail": text}
    assert one(end_of, **fields, returncode=2).cause.message == line


def test_log_on_stderr_without_an_error_gives_way_to_stdout(end_of):
    found = one(end_of, "INFO:root:epoch 1\n", stdout_tail="loss is nan, stopping\n", returncode=4)
    assert found.cause.message == "loss is nan, stopping"


def test_text_of_sys_exit_on_stderr_wins_over_chatter_on_stdout(end_of):
    found = one(end_of, "no data in /data\n", stdout_tail="epoch 1\nepoch 2\n")
    assert (found.cause.message, found.cause.stream) == ("no data in /data", "stderr")
