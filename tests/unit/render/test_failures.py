"""Ends of pods of a rendered job, by the rules of Kubernetes' Job controller and Training Operator
1.9."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.unit.render.conftest import text_of
from tests.unit.render.test_manifests import LITTLE

SIZES = {"one": (1, []), "four": (4, ["--num-nodes=4"]), "elastic": (4, ["--num-nodes=2:4"])}
SEVERAL = ["four", "elastic"]
TOLD, KILLED, MISSING, FAULT = 143, 137, 69, 70
OFTEN = 50


@dataclass
class IndexedJob:
    """A Job as its controller sees it. The first matching rule applies to a failed pod."""

    spec: dict
    counted: int = 0
    failed: bool = False

    def ended(self, *codes: int, disrupted: bool = False) -> bool:
        """Process how pods ended. Return whether they are replaced and the job goes on."""
        for code in codes:
            action = next(
                (rule["action"] for rule in self.rules if _fits(rule, code, disrupted=disrupted)),
                "Count",
            )
            self.failed |= action == "FailJob"
            self.counted += action == "Count"
        self.failed |= self.counted > self.spec["backoffLimit"]
        return not self.failed

    @property
    def rules(self) -> list[dict]:
        return self.spec["podFailurePolicy"]["rules"]


def _fits(rule: dict, code: int, *, disrupted: bool) -> bool:
    if "onPodConditions" in rule:
        return (
            disrupted and {"type": "DisruptionTarget", "status": "True"} in rule["onPodConditions"]
        )
    on = rule["onExitCodes"]
    assert on["containerName"] == "trainer"
    assert on["values"] == sorted(set(on["values"]))
    return (code in on["values"]) == {"In": True, "NotIn": False}[on["operator"]]


@pytest.fixture
def job(manifests):
    """Return a function that makes a Job and returns it with its number of pods."""

    def make(size: str, restarts: int) -> tuple[IndexedJob, int]:
        pods, words = SIZES[size]
        spec = manifests("kubernetes", *LITTLE, *words, f"--max-restarts={restarts}", "t.py")[-1][
            "spec"
        ]
        assert spec["template"]["spec"]["restartPolicy"] == "Never"  # else there may be no rules
        assert spec["podReplacementPolicy"] == "Failed"
        return IndexedJob(spec), pods

    return make


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("size", SIZES)
def test_a_pod_that_is_evicted_again_and_again_does_not_end_the_job(job, size, restarts):
    controlled, pods = job(size, restarts)
    for _ in range(OFTEN):
        assert controlled.ended(TOLD, disrupted=True)
        assert controlled.ended(*[TOLD] * (pods - 1)), "the others are told to end by it"
    assert controlled.counted == 0


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("size", SEVERAL)
def test_a_node_that_is_lost_does_not_end_the_job(job, size, restarts):
    controlled, pods = job(size, restarts)
    for _ in range(OFTEN):
        assert controlled.ended(*[MISSING] * (pods - 1))
        assert controlled.ended(KILLED, disrupted=True)
    assert controlled.counted == 0


@pytest.mark.parametrize("code", [1, 2, 3, 75, 124, 126, 127, 128, 129, 130, 134, 139, 255])
@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("size", SIZES)
def test_a_failure_of_distlaunch_ends_the_job_at_once(job, size, restarts, code):
    controlled, _ = job(size, restarts)
    assert not controlled.ended(code)


@pytest.mark.parametrize("code", [KILLED, FAULT])
@pytest.mark.parametrize("size", SIZES)
def test_an_end_of_all_pods_without_restarts_ends_the_job(job, size, code):
    controlled, pods = job(size, 0)
    assert not controlled.ended(*[code] * pods)


@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_all_pods_may_be_killed_as_often_as_the_job_may_restart(job, size, restarts):
    controlled, pods = job(size, restarts)
    for _ in range(restarts):
        assert controlled.ended(*[KILLED] * pods)
    assert not controlled.ended(*[KILLED] * pods)


@pytest.mark.parametrize("code", [KILLED, FAULT])
@pytest.mark.parametrize(("size", "goes_on"), [("one", False), ("four", False), ("elastic", True)])
def test_only_an_elastic_job_survives_a_lost_pod_without_a_restart(job, size, goes_on, code):
    controlled, _ = job(size, 0)
    assert controlled.ended(code) == goes_on


@pytest.mark.parametrize("size", SEVERAL)
def test_a_pod_may_be_lost_for_each_restart(job, size):
    controlled, _ = job(size, 3)
    assert all(controlled.ended(KILLED) for _ in range(3))


def test_restarts_without_end_are_as_many_as_kubernetes_can_count(manifests):
    made = manifests("kubernetes", *LITTLE, "--num-nodes=4096", "--max-restarts=1000000", "t.py")[
        -1
    ]
    assert made["spec"]["backoffLimit"] == 2**31 - 1


def policies(manifests, *words: str) -> tuple[int, set[str]]:
    (made,) = manifests("pytorchjob", *LITTLE, *words, "t.py")
    replicas = made["spec"]["pytorchReplicaSpecs"].values()
    return made["spec"]["runPolicy"]["backoffLimit"], {each["restartPolicy"] for each in replicas}


def test_a_pytorchjob_replaces_pods_where_the_job_can_go_on(manifests):
    assert policies(manifests, "--num-nodes=4") == (0, {"Never"})
    # The operator ends a job whose limit is 0 at the first failure, whatever restartPolicy says.
    assert policies(manifests, "--num-nodes=2:4") == (3, {"ExitCode"})
    assert policies(manifests, "--num-nodes=4", "--max-restarts=2") == (8, {"ExitCode"})
    assert policies(manifests, "--num-nodes=2:4", "--max-restarts=2") == (11, {"ExitCode"})


@pytest.mark.parametrize(
    ("words", "message"), [([], "forever, unless --time limits it"), (["--time=1h"], "time limit")]
)
def test_a_pytorchjob_has_a_notice_that_its_replacements_are_not_counted(words, message):
    head = " ".join(
        line.removeprefix("# ")
        for line in text_of("pytorchjob", *LITTLE, "--num-nodes=2:4", *words, "t.py").splitlines()
        if line.startswith("# ")
    )
    assert "does not count the pods that it replaces" in head
    assert message in head
    assert "does not count" not in text_of("pytorchjob", *LITTLE, "--num-nodes=4", "t.py")


@pytest.mark.parametrize("size", SIZES)
def test_a_pytorchjob_has_a_master_by_whose_end_it_ends(manifests, size):
    pods, words = SIZES[size]
    (made,) = manifests("pytorchjob", *LITTLE, *words, "--name=big", "t.py")
    replicas = {
        kind: each["replicas"] for kind, each in made["spec"]["pytorchReplicaSpecs"].items()
    }
    assert replicas == {"Master": 1} | ({"Worker": pods - 1} if pods > 1 else {})
    elastic = made["spec"].get("elasticPolicy")
    assert (elastic is None) == (size != "elastic")
    assert elastic is None or elastic["rdzvHost"] == "big-master-0"
