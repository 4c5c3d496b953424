from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from tests.facts import mentions

POD = ["--image=x", "--gpus-per-node=2"]
NO_IMAGES = (
    "a b",
    "Foo/Bar:1",
    "reg.example/Me/train",
    "a//b",
    "a:",
    "a@sha256:12",
    "a/",
    "https://reg.example/a",
    "-a",
)
PODS = ("kubernetes", "pytorchjob", "trainjob")
EVERYWHERE = ("slurm", *PODS)


def refused(text, target: str, *words: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        text(target, *words, **environ)
    assert caught.value.exit_code == 2
    assert caught.value.message.isprintable()
    return f"{caught.value.message} | {caught.value.hint or ''}"


@pytest.mark.parametrize("target", PODS)
def test_pods_need_an_image(text, target):
    assert mentions(refused(text, target, "--gpus-per-node=2", "t.py"), "--image", "missing")


@pytest.mark.parametrize("words", [[], ["--num-gpus=auto"], ["--num-nodes=2"], ["--device=cpu"]])
@pytest.mark.parametrize("target", EVERYWHERE)
def test_the_size_of_a_node_must_be_given(text, target, words):
    image = [] if target == "slurm" else ["--image=x"]
    shown = refused(text, target, *image, *words, "t.py")
    assert mentions(shown, "GPUs")
    assert mentions(shown, "--gpus-per-node", "--procs-per-node")


@pytest.mark.parametrize("target", EVERYWHERE)
def test_more_gpus_than_a_machine_has_need_a_number_of_nodes(text, target):
    image = [] if target == "slurm" else ["--image=x"]
    shown = refused(text, target, *image, "--num-gpus=32", "t.py")
    assert mentions(shown, "--num-nodes", "32 GPUs")
    assert "--num-nodes 1" in shown
    assert "--gpus-per-node N" in shown
    for words in (
        ["--num-gpus=16"],
        ["--num-gpus=32", "--num-nodes=1"],
        ["--num-gpus=32", "--gpus-per-node=8"],
    ):
        assert text(target, *image, *words, "t.py")


@pytest.mark.parametrize(
    "words",
    [
        "--hosts=a,b",
        "--hostfile=h",
        "--discover=d",
        "--node-rank=1",
        "--gpus=0,1",
        "--ssh-user=me",
        "--ssh-port=2222",
        "--source=flags",
        "--dry-run",
    ],
)
@pytest.mark.parametrize("target", EVERYWHERE)
def test_options_that_the_scheduler_decides_are_refused(text, target, words):
    name = words.partition("=")[0]
    image = [] if target == "slurm" else ["--image=x"]
    assert refused(text, target, *image, "--gpus-per-node=2", words, "t.py").startswith(name)


@pytest.mark.parametrize(
    "words", ["--include=a", "--exclude=a", "--spares=1", "--master-addr=h", "--env=HF_TOKEN"]
)
def test_options_without_meaning_in_pods_are_refused_only_for_pods(text, words):
    for target in PODS:
        assert refused(text, target, *POD, words, "t.py").startswith(words.partition("=")[0])
    assert words in text("slurm", "--gpus-per-node=2", "--num-nodes=2", words, "t.py")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--num-nodes=3", "--num-gpus=8"], "cannot be divided evenly among 3 nodes"),
        (["--num-nodes=2:4", "--num-gpus=8"], "is a total, but there may be 2 to 4 nodes"),
        (["--num-gpus=9", "--gpus-per-node=2"], "9 is not a multiple of 2"),
        (
            ["--num-gpus=8", "--gpus-per-node=2", "--num-nodes=3"],
            "make 4 nodes, but --num-nodes is different",
        ),
        (["--num-procs=2", "--device=cuda"], "the number of GPUs to request is not known"),
        (["--gpus-per-node=2", "--device=cpu"], "contradict each other"),
    ],
)
@pytest.mark.parametrize("target", EVERYWHERE)
def test_sizes_that_do_not_fit_are_refused(text, target, words, shown):
    image = [] if target == "slurm" else ["--image=x"]
    assert shown in refused(text, target, *image, *words, "t.py")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--name=My_Job"], "--name 'My_Job' is not a valid name for Kubernetes"),
        (["--name=1a"], "is not a valid name for Kubernetes"),
        (["--name=" + "a" * 64], "is too long"),
        (["--namespace=A"], "--namespace 'A' is not a valid name"),
        (["--namespace=a.b"], "--namespace 'a.b' is not a valid name"),
        (["--namespace=" + "a" * 64], "at most 63"),
        (["--queue=" + "a" * 64], "at most 63"),
        (["--pvc=data"], "--pvc takes NAME:PATH"),
        (["--pvc=data:rel"], "--pvc takes NAME:PATH"),
        (["--pvc=a:/x", "--pvc=b:/x/"], "two volumes have the path '/x'"),
        (["--pvc=a:/dev/shm"], "two volumes have the path '/dev/shm'"),
        (["--pvc=a:/data/../dev//shm"], "two volumes have the path '/dev/shm'"),
        (["--pvc=a:/x/.."], "--pvc takes NAME:PATH"),
        (["--memory=64"], "--memory takes a size like 64Gi"),
        (["--memory=8Gi", "--shm=8Gi"], "--shm 8Gi leaves nothing of --memory 8Gi"),
        (["--shm=lots"], "--shm takes a size"),
        (["--efa=4"], "--efa needs --memory"),
        (["--time=60:00"], "--time takes a time like 120 (minutes), 90m"),
        (["--time=0-00:00:00"], "--time takes a time"),
        (["--gpus-resource=gpu"], "--gpus-resource takes a name like nvidia.com/gpu"),
        (["--token-secret=a b"], "--token-secret 'a b' is not a valid name"),
        (["--queue=Q"], "--queue 'Q' is not a valid name"),
        *(
            (["--image=" + image], "--image takes the name of a container image")
            for image in NO_IMAGES
        ),
        (["--env=A=\udcff"], "is not UTF-8"),
    ],
)
@pytest.mark.parametrize("target", PODS)
def test_values_that_kubernetes_would_refuse_are_refused_here(text, target, words, shown):
    assert shown in refused(text, target, *POD, *words, "t.py")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--partition=a b"], "--partition takes letters"),
        (["--account=$x"], "--account takes letters"),
        (["--name=a b"], "--name takes letters"),
        (["--memory=1.5G"], "--memory takes a size"),
        (["t.py", "a\r\nb"], "has a DOS line break"),
    ],
)
def test_values_that_sbatch_would_refuse_are_refused_here(text, words, shown):
    assert shown in refused(text, "slurm", "--gpus-per-node=2", *words, "t.py")


def test_a_trainjob_has_a_fixed_size(text):
    shown = refused(text, "trainjob", *POD, "--num-nodes=2:4", "t.py")
    assert mentions(shown, "--num-nodes 2:4", "TrainJob")
    assert "render kubernetes" in shown


def test_a_variable_that_set_what_is_refused_is_named(text):
    assert refused(text, "slurm", "--gpus-per-node=2", "t.py", DISTLAUNCH_HOSTS="a").startswith(
        "DISTLAUNCH_HOSTS "
    )


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (["train.py"], "train"),
        (["a/b/Train_GPT2.py"], "train-gpt2"),
        (["-m", "pkg.train"], "pkg-train"),
        (["7b.py"], "job-7b"),
        (["模型.py"], "job"),
        (["x" * 80 + ".py"], "x" * 61),
        (["x" * 60 + "_" + "y" * 20 + ".py"], "x" * 60),
    ],
)
def test_a_name_is_made_of_the_scripts(manifests, script, name):
    assert manifests("kubernetes", *POD, *script)[-1]["metadata"]["name"] == name


@pytest.mark.parametrize("target", PODS)
def test_names_leave_room_for_what_controllers_add(manifests, text, target):
    size = ["--num-nodes=11", "--procs-per-node=1", "--image=x"]
    longest = 63 - len(
        {"kubernetes": "-10", "pytorchjob": "-worker-10", "trainjob": "-node-0-10-abcde"}[target]
    )
    assert manifests(target, *size, "--name=" + "a" * longest, "t.py")
    assert f"at most {longest} characters" in refused(
        text, target, *size, "--name=" + "a" * (longest + 1), "t.py"
    )


@pytest.mark.parametrize(
    "image",
    [
        "a",
        "a:Tag_1",
        "me/train",
        "reg.example:5000/me/a__b-c.d:1",
        "Reg/a",
        "a@sha256:" + "0a" * 32,
        "localhost/a",
    ],
)
def test_images_are_taken_as_they_are_named(manifests, image):
    (job,) = manifests("kubernetes", "--gpus-per-node=2", f"--image={image}", "t.py")
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == image


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--backend=ray"], "--backend ray cannot be rendered"),
        (["--backend=ray", "--address=h:1"], "--backend ray cannot be rendered"),
        (["--address=h:1"], "--address 'h:1': --backend pytorch-ddp does not connect to a cluster"),
        (["--backend=fsdp", "-o", "shading=full"], "did you mean sharding?"),
        (
            ["--backend=tensorflow", "-o", "per=node", "--isolate-gpus"],
            "-o per=node and --isolate-gpus contradict",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", EVERYWHERE)
def test_backend_options_that_launchers_would_refuse_are_refused(text, target, words, shown):
    image = [] if target == "slurm" else ["--image=x"]
    assert shown in refused(text, target, *image, "--gpus-per-node=2", *words, "t.py")


@pytest.mark.parametrize(
    "words", [["--backend=of-another-package"], ["--backend=deepspeed", "-o", "config=there.json"]]
)
@pytest.mark.parametrize("target", EVERYWHERE)
def test_files_that_may_exist_on_the_cluster_only_are_rendered(text, target, words):
    image = [] if target == "slurm" else ["--image=x"]
    assert words[0] in text(target, *image, "--gpus-per-node=2", *words, "t.py")
