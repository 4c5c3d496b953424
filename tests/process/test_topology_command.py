"""``plan`` over many nodes as a user gets it: from each list, file and system; and what ``train`` makes of these."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

CAPTURES = Path(__file__).parents[1] / "data" / "slurm"
HERE = socket.gethostname()

TRAINER = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500"}
"""What Kubeflow Trainer v2 sets (its documentation)."""
MPIRUN = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()}  # fmt: skip
"""What Open MPI's mpirun sets for the second of two processes on a host (captured, see test_mpi)."""
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NUM_NODES": "3",
}
SAYS = "import os; print('is', *(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NODE_RANK')))"


def slurm(name: str) -> dict[str, str]:
    """Give what a process of a Slurm job saw."""
    lines = (CAPTURES / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


@pytest.fixture
def plan(distlaunch):
    """Give the plan that a command line makes, as data."""
    (distlaunch.work / "t.py").write_text(SAYS)

    def make(*words: str, env=None) -> dict:
        result = distlaunch.run(["plan", "--format", "json", *words, "t.py"], env=env)
        assert (result.returncode, result.stderr) == (0, "")
        return json.loads(result.stdout)

    return make


@pytest.fixture
def refused(distlaunch):
    """Give what is said of a command line that is refused: nothing is printed, made or started."""
    (distlaunch.work / "t.py").write_text(SAYS)

    def say(*words: str, env=None, command: str = "plan") -> str:
        result = distlaunch.run([command, *words, "t.py"], env=env)
        assert (result.returncode, result.stdout, result.run_dir) == (2, "", None)
        first, *others = result.stderr.splitlines()
        assert first.startswith("distlaunch: error: ")
        assert all(line.startswith("  hint: ") for line in others)
        assert len(others) <= 1
        return result.stderr

    return say


@pytest.fixture
def train(distlaunch):
    """Run a job whose workers say who they are; give what they said, and all else that was said."""
    (distlaunch.work / "t.py").write_text(SAYS)

    def run(*words: str, env=None) -> tuple[list[str], str]:
        result = distlaunch.train("--format", "plain", *words, "t.py", env=env)
        assert result.returncode == 0, result.stderr
        return sorted(line.partition(" is ")[2] for line in result.stdout.splitlines()), result.stderr

    return run


def placed(record: dict) -> list[tuple[str, int | None, list[int]]]:
    """Give each node's host and slots, and its workers' local ranks."""
    nodes = record["nodes"]
    assert [node["node_rank"] for node in nodes] == list(range(len(nodes)))
    workers = [worker for node in nodes for worker in node["workers"] or ()]
    assert [worker["rank"] for worker in workers] == list(range(len(workers)))
    return [(node["host"], node["slots"], [worker["local_rank"] for worker in node["workers"] or ()]) for node in nodes]


# --- hosts from the user


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["--hosts", "a:2,b:2", "--num-procs", "4"], [("a", 2, [0, 1]), ("b", 2, [0, 1])]),
        (["--hosts", "a:3,b:1,c:2"], [("a", 3, [0, 1, 2]), ("b", 1, [0]), ("c", 2, [0, 1])]),
        (["--hosts", "a:1,b:2"], [("a", 1, [0]), ("b", 2, [0, 1])]),
        (["--hosts", "a:4", "--num-procs", "2"], [("a", 2, [0, 1])]),
        (["--hosts", "a:4,b:4", "--num-procs", "2"], [("a", 2, [0, 1])]),
        (["--hosts", "a:4,b:4", "--num-procs", "2", "--spread"], [("a", 1, [0]), ("b", 1, [0])]),
        (["--hosts", "a:4,b:4,c:4", "--num-procs", "5", "--spread"], [("a", 2, [0, 1]), ("b", 2, [0, 1]), ("c", 1, [0])]),
        (["--hosts", "rack[0-1]node[0-1]:1"], [(f"rack{i}node{j}", 1, [0]) for i in (0, 1) for j in (0, 1)]),
        (["--hosts", "user@h:2,[fd00::7]:1"], [("h", 2, [0, 1]), ("fd00::7", 1, [0])]),
        (["--hosts", "a,b", "--gpus-per-node", "2"], [("a", 2, [0, 1]), ("b", 2, [0, 1])]),
        (["--hosts", "a:8,b:8", "--num-gpus", "8", "--num-nodes", "2"], [("a", 4, [0, 1, 2, 3]), ("b", 4, [0, 1, 2, 3])]),
        (["--hosts", "a,b"], [("a", None, []), ("b", None, [])]),
        (["--hosts", "a:4,b:4", "--include", "b@a:1,3"], [("a", 2, [0, 1]), ("b", 4, [0, 1, 2, 3])]),
        (["--hosts", "n[1-4]:1", "--exclude", "n2@n3"], [("n1", 1, [0]), ("n4", 1, [0])]),
        (["--hosts", "a:1,b:1,c:1", "--exclude", "a", "--num-nodes", "1"], [("b", 1, [0])]),
        (["--discover", "echo a:2; echo b; true", "--procs-per-node", "1"], [("a", 1, [0]), ("b", 1, [0])]),
        (["--num-nodes", "2", "--node-rank", "1", "--master-addr", "h0", "--procs-per-node", "1"], [("h0", 1, [0]), (None, 1, [0])]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and isinstance(value[0], str) else "",
)  # fmt: skip
def test_ranks_go_node_by_node_over_the_hosts_that_were_named(plan, words, nodes):
    record = plan(*words)
    assert placed(record) == nodes
    assert record["world_size"] == (None if None in [slots for _, slots, _ in nodes] else sum(n[1] for n in nodes))
    assert record["master_addr"] == nodes[0][0] or len(nodes) == 1


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("w slots=2 # x\n\n# all\nv slots=1 max_slots=4\n", [("w", 2), ("v", 1)]),
        ("b:2\r\na:1\r\n", [("b", 2), ("a", 1)]),
        ("\ufeffa\tslots=2\nb slots=1\na slots=1\n", [("a", 3), ("b", 1)]),
        ("n2\nn1\nn2\nn1\nn2\n", [("n2", 3), ("n1", 2)]),
        ("[::1]:2\n", [("::1", 2)]),
    ],
    ids=["open mpi", "horovod", "a host that comes again", "pbs", "ipv6"],
)
def test_host_files_of_every_dialect_are_read(plan, distlaunch, text, nodes):
    (distlaunch.work / "hosts").write_text(text, newline="")
    record = plan("--hostfile", "hosts")
    assert record["source"] == "hostfile"
    assert [(node["host"], node["slots"]) for node in record["nodes"]] == nodes


@pytest.mark.parametrize(
    ("text", "line"),
    [("w slots=2abc\n", 1), ("a\nw slots=0\n", 2), ("\n\nw slots=-1\n", 3), ("a:1\nb port=22\na:1 port=23\n", 3)],
)
def test_an_error_in_a_host_file_names_file_and_line(refused, distlaunch, text, line):
    (distlaunch.work / "hosts").write_text(text)
    assert f"error: hosts:{line}: " in refused("--hostfile", "hosts")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "a:2,b:2", "--num-procs", "5"], ["5", "4 slots"]),
        (["--hosts", "n[3-1]"], ["'n[3-1]'"]),
        (["--hosts", "n[]"], ["'n[]'"]),
        (["--hosts", "n[1-9:2]"], ["n[1-9:2]"]),
        (["--hosts", "a:1,a:1:port=22"], ["twice with a different port"]),
        (["--hosts", "a:2", "--exclude", "a"], ["--exclude 'a': no host is left"]),
        (["--hosts", "a:2", "--include", "b"], ["there is no host 'b'", "there are a"]),
        (["--hosts", "a:8,b:8", "--num-gpus", "9", "--num-nodes", "2"], ["--num-gpus 9", "2 nodes"]),
        (["--hosts", "a", "--num-nodes", "2"], ["--num-nodes 2", "1 host"]),
        (["--hosts", "a", "--hostfile", "f"], ["--hosts 'a' and --hostfile 'f' each say which nodes there are"]),
        (["--hostfile", "-"], ["--hostfile '-': No such file", "/dev/stdin"]),
        (["--hosts", "a", "--discover", "touch ran"], ["--hosts 'a' and --discover 'touch ran' each"]),
        (["--hosts", "a", "--source", "slurm"], ["--hosts 'a' and --source 'slurm' each"]),
        (["--hosts", "localhost,127.0.0.1"], ["'localhost' and '127.0.0.1' are both this machine"]),
        (["--hosts", "a,b", "--node-rank", "2"], ["--node-rank 2: ranks of 2 nodes go to 1"]),
        (["--hosts", "a,localhost", "--node-rank", "0"], ["--node-rank 0 is a, but this machine is localhost"]),
        (["--hostfile", "missing"], ["--hostfile 'missing': No such file or directory"]),
        (["--hostfile", "."], ["--hostfile '.': Is a directory"]),
        (["--hostfile", "empty"], ["empty: the file names no host"]),
        (["--hostfile", "/dev/zero"], ["more than 64 MiB"]),
        (["--discover", "true"], ["--discover 'true': the command names no host"]),
        (["--discover", "echo words >&2; exit 3"], ["ended with exit code 3; it said 'words'"]),
        (["--discover", "kill -9 $$"], ["ended with signal SIGKILL"]),
        (["--discover", "echo 'a:x'"], ["line 1"]),
        (["--node-rank", "1"], ["--node-rank 1: ranks of 1 node go to 0", "--num-nodes"]),
        (["--node-rank", "0", "--rendezvous", "h:1"], ["nothing says how many nodes there are", "--num-nodes N"]),
        (["--node-rank", "1", "--num-nodes", "2"], ["nothing says where they meet", "--rendezvous"]),
        (["--node-rank", "1", "--num-nodes", "999999", "--master-addr", "m"], ["--num-nodes 999,999", "at most"]),
        (["--master-addr=-oX"], ["--master-addr: '-oX' is no host name"]),
        (["--num-nodes", "2"], ["--num-nodes 2: only this machine is known"]),
        (["--source", "slurm"], ["--source slurm does not apply", "SLURM_JOB_ID"]),
        (["--source", "slrm"], ["--source 'slrm': no such source"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_what_cannot_be_meant_is_refused_with_the_reason(refused, distlaunch, words, said):
    (distlaunch.work / "empty").touch()
    for command in ("plan", "train"):
        text = refused(*words, command=command)
        assert all(part in text for part in said), text
    assert not (distlaunch.work / "ran").exists()


def test_a_mask_is_taken_at_its_word_where_the_hosts_say_the_same(plan):
    (node,) = plan("--hosts", "localhost:2", env={"CUDA_VISIBLE_DEVICES": "4,5"})["nodes"]
    assert (node["slots"], node["devices"]) == (2, ["4", "5"])
    assert {worker["env"]["CUDA_VISIBLE_DEVICES"] for worker in node["workers"]} == {"4,5"}


def test_hosts_may_be_set_by_the_environment_and_are_not_by_torchruns_name(plan, distlaunch):
    assert placed(plan(env={"DISTLAUNCH_HOSTS": "a:1,b:1"})) == [("a", 1, [0]), ("b", 1, [0])]
    result = distlaunch.run(["torchrun", "t.py"], env={"DISTLAUNCH_HOSTS": "a:1,b:1"})
    assert result.stdout == "is 0 1 0 0\n"


def test_a_node_that_is_filtered_out_is_told_so(plan):
    notes = plan("--exclude", "n1", env=slurm("gpus-per-node-task-per-node-0"))["notes"]
    assert "this machine, n1, is not in the plan" in notes


# --- systems around us


@pytest.mark.parametrize(
    ("env", "source", "nodes"),
    [
        (slurm("gpus-per-node"), "slurm", [("n1", 2, ["0", "1"]), ("n2", 2, None)]),
        (slurm("uneven-gpus"), "slurm", [("n1", 3, ["0", "1", "2"]), ("n2", None, None)]),
        (slurm("tasks-per-node-step-5"), "slurm", [("n1", 3, None), ("n2", 3, None)]),
        (slurm("gres-second-node-0"), "slurm", [("n2", 2, ["4", "5"])]),
        (slurm("salloc-per-node"), "slurm", [("n1", 2, None), ("n2", 2, None)]),
        (TRAINER, "kubernetes", [("job-node-0-0.job", None, None), ("job-node-0-1.job", 1, [])]),
        ({"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "h:29400"}, "kubernetes", [("h", None, None), (None, 1, []), (None, None, None), (None, None, None)]),
        (MPIRUN, "openmpi", [(None, 2, None)]),
        ({"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}, "skypilot", [("10.0.0.1", None, None), ("10.0.0.2", 1, [])]),
    ],
    ids=["batch", "uneven", "tasks", "small step", "salloc", "trainer", "elastic", "mpirun", "skypilot"],
)  # fmt: skip
def test_a_system_says_which_nodes_there_are(plan, env, source, nodes):
    record = plan(env=env)
    assert record["source"] == source
    assert [(node["host"], node["slots"], node["devices"]) for node in record["nodes"]] == nodes


def test_an_elastic_job_shows_both_numbers_of_nodes(plan):
    record = plan(env={"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "h:29400"})
    assert (record["min_nodes"], record["max_nodes"], record["master_addr"], record["master_port"]) == (
        2,
        4,
        "h",
        29400,
    )
    record = plan("--hosts", "a:1,b:1,c:1", "--num-nodes", "2:4")
    assert (record["min_nodes"], record["max_nodes"], len(record["nodes"])) == (2, 4, 3)


@pytest.mark.parametrize(
    ("tasks", "nodes"), [("2(x3),1", [2, 2, 2, 1]), ("4", None), ("2(x3),a", None)], ids=["folded", "too few", "odd"]
)
def test_slurms_tasks_per_node_are_those_of_the_nodes_in_order(plan, refused, tasks, nodes):
    env = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "7",
        "SLURM_TASKS_PER_NODE": tasks,
    }  # fmt: skip
    if nodes is None:
        assert "SLURM_TASKS_PER_NODE" in refused(env=env)
    else:
        assert [node["slots"] for node in plan(env=env)["nodes"]] == nodes


def test_launchers_that_run_together_have_one_id_for_their_job(plan):
    ids = {plan(env=slurm(f"gpus-per-node-task-per-node-{task}"))["job_id"] for task in (0, 1)}
    assert len(ids) == 1
    assert plan("--job-id", "mine", env=slurm("gpus-per-node-task-per-node-0"))["job_id"] == "mine"


STALE = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "NODE_RANK": "1", "MASTER_ADDR": "gone", "MASTER_PORT": "1",
    "TF_CONFIG": '{"cluster": {"worker": ["gone:1", "gone:2"]}}', "OMPI_COMM_WORLD_RANK": "3", "OMPI_MCA_x": "1",
}  # fmt: skip


def test_what_is_left_over_in_a_plain_shell_is_not_used_and_that_can_be_asked(train, plan):
    said, _ = train("--num-procs", "2", env=STALE)
    assert said == ["0 2 0 0", "1 2 1 0"]
    explained = plan("--explain", env=STALE)["explain"]
    assert explained["values"][0] == {
        "value": "source", "shown": "local", "source": "no option and no system names other nodes", "instead_of": []
    }  # fmt: skip
    for name in ("OMPI_COMM_WORLD_RANK", "RANK=", "WORLD_SIZE=", "MASTER_ADDR=", "TF_CONFIG="):
        assert any(name in lost for lost in explained["lost"]), name


def test_variables_that_contradict_each_other_are_quoted(refused):
    env = {**TRAINER, "RANK": "0"}
    text = refused(env=env)
    assert "RANK='0'" in text
    assert "PET_NODE_RANK='1'" in text


# --- what is explained


def test_each_value_has_a_source_and_losers_have_a_reason(plan):
    env = {**slurm("gpus-per-node-task-per-node-1"), "RANK": "5", "DISTLAUNCH_GPUS_PER_NODE": "2"}
    explained = plan("--explain", "--master-addr", "head", env=env)["explain"]
    values = {each["value"]: each for each in explained["values"]}
    assert (values["hosts"]["shown"], values["hosts"]["source"]) == ("n[1-2]", "SLURM_STEP_NODELIST")
    assert any("SLURM_JOB_NODELIST" in other for other in values["hosts"]["instead_of"])
    assert (values["node rank"]["shown"], values["node rank"]["source"]) == ("1", "SLURM_NODEID")
    assert (values["workers"]["shown"], values["workers"]["source"]) == (
        "4, on the nodes 2(x2)",
        "DISTLAUNCH_GPUS_PER_NODE",
    )
    assert (values["devices here"]["shown"], values["devices here"]["source"]) == ("0,1", "CUDA_VISIBLE_DEVICES=0,1")
    assert values["master"]["source"] == "--master-addr"
    assert explained["lost"] == ["RANK='5': slurm decides"]


def test_lists_of_the_user_win_over_systems_and_that_is_explained(plan):
    explained = plan("--hosts", "a:1,b:1", "--explain", env=slurm("gpus-per-node"))["explain"]
    assert explained["values"][0]["source"] == "--hosts"
    assert any("slurm" in lost or "SLURM" in lost for lost in explained["lost"])
    assert all("--hosts comes first" in lost for lost in explained["lost"])


@pytest.mark.parametrize(
    ("words", "env", "value", "source"),
    [
        ([], {"DISTLAUNCH_HOSTS": "a:1,b:1"}, "source", "DISTLAUNCH_HOSTS"),
        ([], {"DISTLAUNCH_HOSTS": "a:1,b:1"}, "hosts", "DISTLAUNCH_HOSTS"),
        (["--num-procs", "2"], {"DISTLAUNCH_NUM_PROCS": "2"}, "workers", "--num-procs"),
        ([], {"DISTLAUNCH_NUM_PROCS": "02"}, "workers", "DISTLAUNCH_NUM_PROCS"),
        (["--num-nodes", "2", "--master-addr", "m"], {"DISTLAUNCH_NODE_RANK": "0"}, "this machine", "DISTLAUNCH_NODE_RANK"),
        (["--num-nodes", "2", "--node-rank", "0"], {"DISTLAUNCH_MASTER_ADDR": "m"}, "hosts", "--num-nodes and DISTLAUNCH_MASTER_ADDR"),
        (["--include", "localhost"], {}, "source", "--include"),
        (["--include", "127.0.0.1:0", "--procs-per-node", "1"], {}, "source", "--include"),
        ([], {"DISTLAUNCH_DISCOVER": "echo a:1; : sesame"}, "hosts", "DISTLAUNCH_DISCOVER"),
        ([], TRAINER, "source", "found in the environment"),
        ([], TRAINER, "master port", "PET_MASTER_PORT"),
        (["--master-port", "5"], TRAINER, "master port", "--master-port"),
        (["--hosts", "a:1"], {}, "master port", "a free one, held at the start"),
        (["--source", "kubernetes"], TRAINER, "source", "--source"),
    ],
)  # fmt: skip
def test_who_said_it_is_known_and_not_guessed(plan, words, env, value, source):
    explained = plan("--explain", *words, env=env)["explain"]
    assert [each["source"] for each in explained["values"] if each["value"] == value] == [source]


def test_people_read_the_explanation_after_the_table_and_before_the_job(distlaunch, train):
    result = distlaunch.run(["plan", "--hosts", "localhost:1", "--explain", "t.py"])
    table, _, explanation = result.stdout.partition("Where this comes from\n")
    assert "localhost" in table
    assert "  source           flags  (--hosts)\n" in explanation
    said, told = train("--hosts", "localhost:1", "--explain")
    assert said == ["0 1 0 0"]
    assert told.index("where this comes from") < told.index(": 1 worker on localhost")


# --- what train does with it


@pytest.mark.parametrize(
    ("words", "env", "code", "parts"),
    [
        (["--num-nodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1", "--num-procs", "2"], {}, 69, ["1 of 2 nodes", "node 1", "has not called"]),
        (["--num-nodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:1"], {}, 69, ["node 0 has not answered at 127.0.0.1:1", "connection refused"]),
        (["--num-nodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:"], {}, 2, ["--rendezvous '127.0.0.1:'", "HOST:PORT"]),
        (["--num-nodes", "2", "--node-rank", "1", "--rendezvous", "h:5", "--master-port", "5"], {}, 2, ["port 5 cannot be both"]),
        (["--rendezvous", "nobody.invalid:5"], slurm("gpus-per-node-task-per-node-1"), 69, ["node 0 has not answered at nobody.invalid:5", "resolve"]),
        ([], MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, 2, ["openmpi starts several launchers", "--rendezvous HOST:PORT"]),
        (["--spares", "1", "--num-nodes", "2"], SKYPILOT, 2, ["--spares 1 node", "--num-nodes MIN:MAX"]),
    ],
    ids=["nobody calls", "nobody answers", "no port", "one port for two", "no such host", "nowhere", "spares"],
)  # fmt: skip
def test_a_launcher_that_finds_no_others_says_what_is_missing(distlaunch, words, env, code, parts):
    (distlaunch.work / "t.py").write_text(SAYS)
    result = distlaunch.run(["train", "--join-timeout", "0.3", *words, "t.py"], env=env)
    assert result.returncode == code, result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


@pytest.mark.parametrize(
    ("words", "env", "workers"),
    [
        (["--hosts", "localhost:2"], {}, 2),
        (["--hosts", f"{HERE}:2"], {}, 2),
        (["--hosts", "127.0.0.1:3", "--num-procs", "2"], {}, 2),
        (["--hosts", "localhost:2,a:2", "--num-nodes", "1"], {}, 2),
        (["--hosts", "localhost:2,a:2", "--exclude", "a"], {}, 2),
        (["--hosts", "a:2,localhost:2", "--include", "localhost:1"], {}, 1),
        (["--node-rank", "0", "--num-procs", "2"], {}, 2),
        ([], slurm("types"), 4),
        (["--num-procs", "3"], slurm("types"), 3),
        ([], slurm("gres-second-node-0"), 2),
        ([], slurm("srun-gpus-per-task-step-2") | {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1"}, 1),
        (["--num-nodes", "1"], slurm("uneven-gpus"), 3),
        (["--num-nodes", "1"], slurm("gpus-per-node-task-per-node-1"), 2),
        (["--num-nodes", "1", "--num-procs", "2"], TRAINER, 2),
        (["--source", "flags", "--num-procs", "2"], slurm("tasks-per-node-step-5"), 2),
        (["--source", "flags"], MPIRUN, 1),
        ([], {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 1),
        ([], {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "web-abc"}, 1),
    ],
)  # fmt: skip
def test_a_job_of_this_machine_alone_runs_as_ever(train, words, env, workers):
    said, _ = train(*words, env=env)
    assert said == [f"{rank} {workers} {rank} 0" for rank in range(workers)]


@pytest.mark.parametrize("env", [slurm("gpus-per-node"), slurm("tasks-per-node-step-5"), MPIRUN], ids=["batch", "step", "mpirun"])  # fmt: skip
def test_torchruns_name_means_torchruns_options_whatever_is_around(distlaunch, env):
    (distlaunch.work / "t.py").write_text(SAYS)
    result = distlaunch.run(["torchrun", "--nproc-per-node", "2", "t.py"], env=env)
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["is 0 2 0 0", "is 1 2 1 0"])
