"""Manifests are valid for all supported releases of Kubernetes and for Kubeflow's models."""

from __future__ import annotations

import math

import kubernetes_validate
import pytest

from tests.unit.render.cluster import SECRET, pods_of

RELEASES = [f"1.{minor}" for minor in range(29, 38)]
MUCH = [
    "--num-nodes=4",
    "--gpus-per-node=8",
    "--image=registry.example/team/train:1.2@sha256:" + "0123abcd" * 8,
    "--namespace=team",
    "--cpus=48",
    "--memory=512Gi",
    "--shm=64Gi",
    "--efa=4",
    "--pvc=data:/data",
    "--pvc=ckpt.v1:/ckpt",
    "--token-secret=token",
    "--queue=team-queue",
    "--time=1-12:00:00",
    "--max-restarts=3",
    "--grace=40.5",
    "--log-dir=/ckpt/logs",
]
LITTLE = ["--image=train", "--procs-per-node=2"]
ODD = [
    "train.py",
    "--flag",
    "no",
    "012",
    "1e3",
    "a\nb",
    "😀",
    "$(HOME)",
    "$$",
    "$",
    "it's",
    '"q"',
    "",
    " ",
    "- x",
    "$é",
]
SIZES = {"one": [], "four": ["--num-nodes=4"], "elastic": ["--num-nodes=2:4"]}
KINDS = {"kubernetes": "Job", "pytorchjob": "PyTorchJob", "trainjob": "TrainJob"}


def valid(document: dict, release: str) -> None:
    kubernetes_validate.validate(document, release, strict=True)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "words", [LITTLE, [*LITTLE, "--num-nodes=4"], MUCH], ids=["one", "four", "much"]
)
def test_jobs_are_valid_in_every_release(manifests, release, words):
    for document in manifests("kubernetes", *words, *ODD):
        valid(document, release)


@pytest.mark.parametrize("release", RELEASES[1:])
def test_elastic_jobs_are_valid_where_a_job_has_a_success_policy(manifests, release):
    for document in manifests("kubernetes", *LITTLE, "--num-nodes=2:4", *ODD):
        valid(document, release)


@pytest.mark.parametrize(
    "words", [LITTLE, [*LITTLE, "--num-nodes=4"], MUCH], ids=["one", "four", "much"]
)
@pytest.mark.parametrize("target", KINDS)
def test_every_pod_is_valid_by_itself(manifests, target, words):
    for pod in pods_of(manifests(target, *words, *ODD)):
        valid(pod.spec, "1.29")
        valid(pod.spec, "1.37")


def closed(kind: str, value: object) -> None:
    """Check a value against a model of kubeflow-training or its client. Unknown fields are
    errors."""
    # here, since each process of a session imports this module
    from kubeflow.training import models as training
    from kubernetes.client import models as core

    if kind.startswith("list["):
        for each in value:
            closed(kind[5:-1], each)
        return
    if kind.startswith("dict("):
        inner = kind[5:-1].partition(", ")[2]
        for each in value.values():
            closed(inner, each)
        return
    model = getattr(training, kind, None) or getattr(core, kind, None)
    if model is None:
        expected = {"str": str, "int": int, "bool": bool, "object": object, "float": float}[kind]
        assert isinstance(value, expected), (kind, value)
        return
    fields = {model.attribute_map[name]: inner for name, inner in model.openapi_types.items()}
    for name, each in value.items():
        assert name in fields, (kind, name)
        closed(fields[name], each)


@pytest.mark.parametrize(
    "words", [LITTLE, [*LITTLE, "--num-nodes=2:4"], MUCH], ids=["one", "elastic", "much"]
)
def test_pytorchjobs_have_no_field_that_kubeflows_model_lacks(manifests, words):
    (job,) = manifests("pytorchjob", *words, *ODD)
    closed("KubeflowOrgV1PyTorchJob", job)
    for bad in ({**job, "spce": {}}, {**job, "spec": {**job["spec"], "nprocPerNode": 8}}):
        with pytest.raises(AssertionError):
            closed("KubeflowOrgV1PyTorchJob", bad)


@pytest.mark.parametrize("words", [LITTLE, MUCH], ids=["one", "much"])
def test_trainjobs_have_no_field_that_kubeflows_model_lacks(manifests, words):
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    (job,) = manifests("trainjob", *words, *ODD)
    # What a model does not know it drops, so that what comes back is what it knows.
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert TrainerV1alpha1TrainJob.from_dict({**job, "spce": {}}).to_dict() == job


@pytest.mark.parametrize("size", ["one", "four"])
@pytest.mark.parametrize("target", KINDS)
def test_the_kind_and_the_name_are_as_asked(manifests, target, size):
    *others, job = manifests(target, *LITTLE, *SIZES[size], "--name=my-job", "t.py")
    assert (job["kind"], job["metadata"]) == (KINDS[target], {"name": "my-job"})
    assert [each["kind"] for each in others] == (
        ["Service"] if target == "kubernetes" and size == "four" else []
    )


@pytest.mark.parametrize("target", [*KINDS, "slurm"])
def test_equal_requests_give_equal_files(text, target):
    words = [
        "--num-nodes=4",
        "--procs-per-node=2",
        *([] if target == "slurm" else ["--image=x", "--pvc=a:/a"]),
        *ODD,
    ]
    assert text(target, *words) == text(target, *words)


@pytest.mark.parametrize("target", KINDS)
def test_the_script_gets_its_arguments_byte_for_byte(manifests, target):
    for pod in pods_of(manifests(target, *LITTLE, "--num-nodes=2", *ODD)):
        assert pod.argv[-len(ODD) :] == ODD


@pytest.mark.parametrize("target", KINDS)
def test_a_script_that_looks_like_an_option_stays_the_script(manifests, target):
    argv = pods_of(manifests(target, *LITTLE, "--", "--odd.py", "--lr"))[0].argv
    assert argv[-3:] == ["--", "--odd.py", "--lr"]


def job_of(manifests, *words: str) -> dict:
    return manifests("kubernetes", *LITTLE, *words, "t.py")[-1]["spec"]


@pytest.mark.parametrize("target", KINDS)
def test_the_file_says_how_its_output_is_read(text, target):
    body = text(target, *LITTLE, "--num-nodes=3", "--namespace=team", "--name=big", "t.py")
    [line] = [line for line in body.splitlines() if line.startswith("#   kubectl -n team logs -f ")]
    assert "--max-log-requests=3" in line  # kubectl follows 5 at most, unless told
    assert line.endswith("-name=big")


def test_pods_find_each_other_before_they_are_ready(manifests):
    service, job = manifests("kubernetes", *LITTLE, "--num-nodes=2", "--namespace=team", "t.py")
    assert service["metadata"] == {"name": "t", "namespace": "team"}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == (
        "None",
        True,
    )
    assert job["spec"]["template"]["spec"]["subdomain"] == "t"


@pytest.mark.parametrize("target", KINDS)
def test_volumes_are_where_they_are_mounted(manifests, target):
    for pod in pods_of(manifests(target, *MUCH, "t.py")):
        volumes = {each.pop("name"): each for each in map(dict, pod.spec["spec"]["volumes"])}
        (container,) = pod.spec["spec"]["containers"]
        assert {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]} == {
            "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
            "/data": {"persistentVolumeClaim": {"claimName": "data"}},
            "/ckpt": {"persistentVolumeClaim": {"claimName": "ckpt.v1"}},
        }
        assert pod.spec["spec"]["terminationGracePeriodSeconds"] == 46
        assert pod.environ["FI_PROVIDER"] == "efa"


def test_an_elastic_jobs_success_is_its_coordinators(manifests):
    assert job_of(manifests, "--num-nodes=2:4")["successPolicy"] == {
        "rules": [{"succeededIndexes": "0"}]
    }
    assert job_of(manifests, "--num-nodes=2:4")["completions"] == 4
    assert "successPolicy" not in job_of(manifests, "--num-nodes=4")


def test_a_pod_is_given_more_time_to_end_than_the_launcher_takes(manifests):
    for grace in (0, 25, 40.5):
        spec = job_of(manifests, f"--grace={grace}")["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] == math.ceil(grace) + 5


def test_pods_have_time_to_start_unless_an_option_sets_it(manifests):
    def command(*words: str) -> list[str]:
        return job_of(manifests, *words)["template"]["spec"]["containers"][0]["command"]

    assert "--join-timeout=600" in command("--num-nodes=2")
    assert "--join-timeout=30" in command("--num-nodes=2", "--join-timeout=30s")
    assert "--join-timeout=60" in command("--num-nodes=2", "--join-timeout=60")
    assert not [word for word in command() if word.startswith("--join-timeout")]


def test_resources_are_those_asked_for(manifests):
    (container,) = manifests("kubernetes", *MUCH, "t.py")[-1]["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["resources"] == {
        "limits": {
            "cpu": "48",
            "memory": "512Gi",
            "nvidia.com/gpu": "8",
            "vpc.amazonaws.com/efa": "4",
            "hugepages-2Mi": "5120Mi",
        }
    }
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert [each["mountPath"] for each in container["volumeMounts"]] == [
        "/dev/shm",
        "/data",
        "/ckpt",
    ]


def test_other_gpus_have_another_name(manifests):
    spec = manifests(
        "kubernetes", "--gpus-per-node=2", "--image=x", "--gpus-resource=amd.com/gpu", "t.py"
    )[-1]["spec"]
    pod = spec["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert pod["tolerations"][0]["key"] == "amd.com/gpu"


def test_nodes_with_parts_of_gpus_have_the_taint_of_whole_ones(manifests):
    part = "nvidia.com/mig-1g.10gb"
    (job,) = manifests(
        "kubernetes", "--gpus-per-node=2", "--image=x", f"--gpus-resource={part}", "t.py"
    )
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {part: "2"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"


@pytest.mark.parametrize("target", KINDS)
def test_the_token_is_named_and_never_written(manifests, text, target):
    words = [*LITTLE, "--num-nodes=2", "--token-secret=tok", "t.py"]
    body = text(target, *words, DISTLAUNCH_TOKEN="hunter2")
    assert "hunter2" not in body
    assert "kubectl create secret generic tok" in body
    assert all(
        pod.environ["DISTLAUNCH_TOKEN"] == SECRET for pod in pods_of(manifests(target, *words))
    )
