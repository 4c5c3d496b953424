from __future__ import annotations

import subprocess
import sys

import pytest

SOURCE = """
import resource, subprocess
from distlaunch.transport.open_files import raise_limit_for_job, with_original_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_limit_for_job(connections={links}, logs={logs})
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
words = ["sh", "-c", 'ulimit -Sn; ulimit -Hn; echo "$0" "$@"', "a b", "$x"]
subprocess.run(with_original_limit(words), check=True)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "links", "logs", "ours"),
    [
        (256, 1024, 2, 4, 256),
        (256, 1000, 64, 4096, 1000),
        (64, 1000, 10, 100, 328),
    ],
)
def test_the_limit_is_raised_as_far_as_needed_for_us_alone(soft, hard, links, logs, ours):
    source = SOURCE.format(soft=soft, hard=hard, links=links, logs=logs)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n") == [str(ours), str(soft), str(hard), "a b $x", ""]


TWICE = """
import resource
from distlaunch.transport.open_files import original_limit, raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
print(original_limit(100), raise_limit(50), raise_limit(200), raise_limit(1000), raise_limit(1000), original_limit(300), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_first_limit_is_kept_however_often_it_is_raised():
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "100 False True True False 100 (300, 300)\n"
