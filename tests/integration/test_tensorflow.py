"""The real TensorFlow: MultiWorkerMirroredStrategy trains a tf_keras model, and finds its workers
by TF_CONFIG."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.launcher import PROGRAMS

# Its environment takes two minutes to make on two cores, once.
pytestmark = pytest.mark.timeout(900)

PROGRAM = PROGRAMS / "frameworks" / "tensorflow_digits.py"
PATIENCE_S = 300


@pytest.fixture(scope="module")
def python(tensorflow_python) -> str:
    return tensorflow_python


def trained(text: str) -> dict:
    return json.loads(text.partition("trained ")[2].splitlines()[0])


@pytest.fixture(scope="module")
def alone(python) -> dict:
    """Return the result of one process with the whole batch, without a launcher."""
    words = ["env", "-u", "TF_CONFIG", "TF_USE_LEGACY_KERAS=1", python, PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return trained(done.stdout)


def test_a_chief_and_a_worker_have_the_losses_of_one_process(distlaunch, python, alone):
    """tests/cluster/test_ssh_tensorflow.py has workers without a chief, over two hosts."""
    words = (
        "--backend",
        "tensorflow",
        "--num-procs",
        "2",
        "--format",
        "plain",
        "--python",
        python,
        "-o",
        "chief",
    )
    result = distlaunch.train(
        *words, PROGRAM, timeout=PATIENCE_S, env={"TF_CONFIG": '{"cluster": "stale"}'}
    )
    assert result.returncode == 0, result.stderr
    first, second = (trained("\n".join(result.lines_of(rank))) for rank in (0, 1))
    assert [(each["task"]["type"], each["task"]["index"]) for each in (first, second)] == [
        ("chief", 0),
        ("worker", 0),
    ]
    assert [each["replicas"] for each in (alone, first, second)] == [1, 2, 2]
    assert first["keras"].startswith("tf_keras."), "Keras 3 does not train under this strategy"
    assert first["loss"] == second["loss"]
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-3)
    assert first["accuracy"][-1] > 0.9
