"""What the last report says of workers that left nothing, or that had to be killed."""

from __future__ import annotations

from tests.facts import mentions


def test_no_log_is_named_that_is_not_there(job, distlaunch):
    script = distlaunch.work / "train.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    os._exit(7)\ntime.sleep(600)\n"
    )
    result = job.run(script)
    assert result.returncode == 7
    assert not (result.run_dir / "attempt-0" / "rank-1.log").exists()
    assert f"  logs: {result.run_dir}/attempt-0 (rank 1 wrote none)" in result.stderr


def test_a_worker_that_was_killed_while_it_saved_is_reported_with_how_to_leave_it_more_time(
    job, distlaunch
):
    result = job.run("ends.py", "--ignore", "3", options=["--failure-grace", "1"])
    assert result.returncode == 3
    assert mentions(result.stderr, "rank 1", "KILL", "1 s", "--failure-grace")
    assert mentions(result.stderr, "hint", "killed", "--failure-grace")
