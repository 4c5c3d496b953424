from __future__ import annotations

import os

import pytest

from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import TRAIN
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions

WRITES = "import os, sys\nos.write(1, b'out' + b'x' * 100000)\nos.write(2, b'err')\n"


def test_every_byte_of_each_rank_is_filed_on_the_node_too(agent, tmp_path):
    logs = tmp_path / "logs"
    for attempt in (0, 1):
        agent.start(
            WRITES,
            "print('two')",
            node_logs=str(logs),
            attempt=attempt,
            env={**agent.env, "DISTLAUNCH_JOB_ID": "my-job"},
        )
        agent.until(m.AttemptEnded, attempt + 1)
        folder = logs / "my-job" / f"attempt-{attempt}"
        assert sorted(os.listdir(folder)) == ["rank-0.log", "rank-1.log"]
        text = (folder / "rank-0.log").read_bytes()
        assert (len(text), text.count(b"x")) == (100_006, 100_000)
        assert (folder / "rank-1.log").read_bytes() == b"two\n"
        assert {os.stat(each).st_mode & 0o777 for each in (folder, folder.parent)} == {0o700}
        assert os.stat(folder / "rank-0.log").st_mode & 0o777 == 0o600
    assert len(agent.taken[0, 1]) == 2 * 100_003


@pytest.mark.parametrize("stands_there", ["a file", "a link"])
def test_logs_that_cannot_be_written_are_one_notice_and_no_end(agent, tmp_path, stands_there):
    logs_dir = tmp_path / "logs"
    if stands_there == "a file":
        logs_dir.touch()
        why = "Not a directory"
    else:
        (logs_dir / "job" / "attempt-0").mkdir(parents=True)
        for rank in (0, 1):
            (logs_dir / "job" / "attempt-0" / f"rank-{rank}.log").symlink_to("/dev/full")
        why = "Too many levels of symbolic links"
    agent.start(WRITES, WRITES, node_logs=str(logs_dir))
    agent.until(m.AttemptEnded)
    [notice] = agent.of(m.AgentNotice)
    assert notice.warning
    assert mentions(notice.text, why, f"{logs_dir}/job")
    assert {one.returncode for one in agent.of(WorkerExit)} == {0}
    assert len(agent.taken[1, 1]) == 100_003


def test_logs_are_filed_while_nobody_gives_credit_only_as_far_as_is_read(agent, tmp_path):
    agent.start("import os; os.write(1, b'end')", node_logs=str(tmp_path / "logs"), credit=0)
    agent.until(m.AttemptEnded)
    assert (tmp_path / "logs" / "job" / "attempt-0" / "rank-0.log").read_bytes() == b"end"


def test_logs_on_the_node_have_the_limit_of_the_job(agent, tmp_path):
    source = "for number in range(20000):\n    print(number, 'x' * 40)\n"
    layout = replace(TRAIN, log_bytes=128 << 10)
    agent.start(source, node_logs=str(tmp_path / "logs"), layout=layout)
    agent.until(m.AttemptEnded)
    data = (tmp_path / "logs" / "job" / "attempt-0" / "rank-0.log").read_bytes()
    assert len(data) < 512 << 10
    assert data.startswith(b"0 x")
    assert data.splitlines()[-1].startswith(b"19999 x")
    assert data.count(b"left out here") == 1
