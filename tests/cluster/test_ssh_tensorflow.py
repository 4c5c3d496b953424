"""Workers on several hosts with each other's ports: their nodes hold them, and all reach all."""

from __future__ import annotations

import json
import sys

import pytest

from tests.launcher import PROGRAMS

CONNECTS_TO_ALL = PROGRAMS / "connects_to_all.py"
TRAINS = PROGRAMS / "frameworks" / "tensorflow_digits.py"
PATIENCE_S = 300
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def python(tensorflow_python) -> str:
    return tensorflow_python


def message(text: str) -> list[dict]:
    return [json.loads(line[line.index("{") :]) for line in text.splitlines() if "{" in line]


def test_workers_on_all_hosts_reach_each_other_where_they_are_reported(hosts, tmp_path):
    for module in ("tensorflow", "tf_keras"):
        (tmp_path / f"{module}.py").touch()
    words = (
        "--backend",
        "tensorflow",
        "--python",
        sys.executable,
        "--hosts",
        "n1:1,n2:2,n3:1",
        "--device",
        "cpu",
    )
    result = hosts.train(*words, CONNECTS_TO_ALL, env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    reported = sorted(message(result.stdout), key=lambda each: each["rank"])
    [cluster] = {json.dumps(each["config"]["cluster"]) for each in reported}
    places = json.loads(cluster)["worker"]
    assert [each["met"] for each in reported] == [places] * 4
    of_hosts = [folder.rpartition(":")[0] for folder in places]
    assert of_hosts[1] == of_hosts[2]
    assert len(set(of_hosts)) == 3
    hosts.assert_clean()


def test_a_training_over_two_hosts_is_one_training(hosts, python):
    words = (
        "--backend",
        "tensorflow",
        "-o",
        "per=node",
        "--hosts",
        "n1,n2",
        "--format",
        "plain",
        "--python",
        python,
    )
    result = hosts.train(*words, TRAINS, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stderr
    trained = message(result.stdout)
    assert [each["replicas"] for each in trained] == [2, 2]
    assert trained[0]["loss"] == trained[1]["loss"]
    assert trained[0]["accuracy"][-1] > 0.9
    hosts.assert_clean()
