"""``plan`` over nodes that a user has named: by lists, files and commands."""

from __future__ import annotations

import json

import pytest

from tests.facts import mentions
from tests.process.topology.conftest import slurm


def placed(record: dict) -> list[tuple[str, int | None, list[int]]]:
    """Return each node's host and slots, and its workers' local ranks."""
    nodes = record["nodes"]
    assert [node["node_rank"] for node in nodes] == list(range(len(nodes)))
    workers = [worker for node in nodes for worker in node["workers"] or ()]
    assert [worker["rank"] for worker in workers] == list(range(len(workers)))
    return [
        (node["host"], node["slots"], [worker["local_rank"] for worker in node["workers"] or ()])
        for node in nodes
    ]


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["--hosts", "a:2,b:2", "--num-procs", "4"], [("a", 2, [0, 1]), ("b", 2, [0, 1])]),
        (["--hosts", "a:3,b:1,c:2"], [("a", 3, [0, 1, 2]), ("b", 1, [0]), ("c", 2, [0, 1])]),
        (["--hosts", "a:1,b:2"], [("a", 1, [0]), ("b", 2, [0, 1])]),
        (["--hosts", "a:4", "--num-procs", "2"], [("a", 2, [0, 1])]),
        (["--hosts", "a:4,b:4", "--num-procs", "2"], [("a", 2, [0, 1])]),
        (["--hosts", "a:4,b:4", "--num-procs", "2", "--spread"], [("a", 1, [0]), ("b", 1, [0])]),
        (
            ["--hosts", "a:4,b:4,c:4", "--num-procs", "5", "--spread"],
            [("a", 2, [0, 1]), ("b", 2, [0, 1]), ("c", 1, [0])],
        ),
        (
            ["--hosts", "rack[0-1]node[0-1]:1"],
            [(f"rack{i}node{j}", 1, [0]) for i in (0, 1) for j in (0, 1)],
        ),
        (["--hosts", "user@h:2,[fd00::7]:1"], [("h", 2, [0, 1]), ("fd00::7", 1, [0])]),
        (["--hosts", "a,b", "--gpus-per-node", "2"], [("a", 2, [0, 1]), ("b", 2, [0, 1])]),
        (
            ["--hosts", "a:8,b:8", "--num-gpus", "8", "--num-nodes", "2"],
            [("a", 4, [0, 1, 2, 3]), ("b", 4, [0, 1, 2, 3])],
        ),
        (["--hosts", "a,b"], [("a", None, []), ("b", None, [])]),
        (
            ["--hosts", "a:4,b:4", "--include", "b@a:1,3"],
            [("a", 2, [0, 1]), ("b", 4, [0, 1, 2, 3])],
        ),
        (["--hosts", "n[1-4]:1", "--exclude", "n2@n3"], [("n1", 1, [0]), ("n4", 1, [0])]),
        (["--hosts", "a:1,b:1,c:1", "--exclude", "a", "--num-nodes", "1"], [("b", 1, [0])]),
        (
            ["--discover", "echo a:2; echo b; true", "--procs-per-node", "1"],
            [("a", 1, [0]), ("b", 1, [0])],
        ),
        (
            [
                "--num-nodes",
                "2",
                "--node-rank",
                "1",
                "--master-addr",
                "h0",
                "--procs-per-node",
                "1",
            ],
            [("h0", 1, [0]), (None, 1, [0])],
        ),
    ],
    ids=lambda value: (
        " ".join(value) if isinstance(value, list) and isinstance(value[0], str) else ""
    ),
)
def test_ranks_go_node_by_node_over_the_hosts_that_were_named(plan, words, nodes):
    record = plan(*words)
    assert placed(record) == nodes
    assert record["world_size"] == (
        None if None in [slots for _, slots, _ in nodes] else sum(n[1] for n in nodes)
    )
    assert record["master_addr"] == nodes[0][0] or len(nodes) == 1


def test_a_job_that_leaves_a_named_host_idle_warns_and_names_the_number_for_each_host(
    distlaunch, plan, train
):
    words = ["--hosts", "localhost:2,far:2", "--num-procs", "2"]
    warning = "--num-procs 2 is for the whole job, so far gets no worker; --procs-per-node 2 starts 2 on each host"
    assert plan(*words)["notes"] == [warning]
    workers, message = train(*words)
    assert [worker.split()[:2] for worker in workers] == [["0", "2"], ["1", "2"]]
    assert f"distlaunch: {warning}\n" in message
    result = distlaunch.train("--format", "jsonl", *words, "t.py")
    (event,) = [
        record
        for record in map(json.loads, result.stdout.splitlines())
        if record.get("text") == warning
    ]
    assert event["level"] == "warning"
    assert "whole job" not in train(*words, "--procs-per-node", "2")[1]


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
    [
        ("w slots=2abc\n", 1),
        ("a\nw slots=0\n", 2),
        ("\n\nw slots=-1\n", 3),
        ("a:1\nb port=22\na:1 port=23\n", 3),
    ],
)
def test_an_error_in_a_host_file_names_file_and_line(refused, distlaunch, text, line):
    (distlaunch.work / "hosts").write_text(text)
    assert f"error: hosts:{line}: " in refused("--hostfile", "hosts")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "a:2,b:2", "--num-procs", "5"], ["5", "4 slots"]),
        (["--hosts", "n[3-1]"], ["'n[3-1]'"]),
        (["--hosts", "n[]"], ["'n[]'"]),
        (["--hosts", "n[1-9:2]"], ["n[1-9:2]"]),
        (["--hosts", "a:1,a:1:port=22"], ["twice with a different port"]),
        (["--hosts", "a:2", "--exclude", "a"], ["--exclude 'a': no host is left"]),
        (["--hosts", "a:2", "--include", "b"], ["there is no host 'b'", "there is a\n"]),
        (
            ["--hosts", "a:8,b:8", "--num-gpus", "9", "--num-nodes", "2"],
            ["--num-gpus 9", "2 nodes"],
        ),
        (["--hosts", "a", "--num-nodes", "2"], ["--num-nodes 2", "1 host"]),
        (
            ["--hosts", "a", "--hostfile", "f"],
            ["--hosts 'a' and --hostfile 'f' each say which nodes there are"],
        ),
        (["--hostfile", "-"], ["--hostfile '-': No such file", "/dev/stdin"]),
        (
            ["--hosts", "a", "--discover", "touch ran"],
            ["--hosts 'a' and --discover 'touch ran' each"],
        ),
        (["--hosts", "a", "--source", "slurm"], ["--hosts 'a' and --source 'slurm' each"]),
        (["--hosts", "localhost,127.0.0.1"], ["'localhost' and '127.0.0.1' are both this machine"]),
        (["--hosts", "a,b", "--node-rank", "2"], ["--node-rank 2: ranks of 2 nodes go to 1"]),
        (
            ["--hosts", "a,localhost", "--node-rank", "0"],
            ["--node-rank 0 is a, but this machine is localhost"],
        ),
        (["--hostfile", "missing"], ["--hostfile 'missing': No such file or directory"]),
        (["--hostfile", "."], ["--hostfile '.': Is a directory"]),
        (["--hostfile", "empty"], ["empty: the file names no host"]),
        (["--hostfile", "/dev/zero"], ["more than 64 MiB"]),
        (["--discover", "true"], ["--discover 'true': the command names no host"]),
        (
            ["--discover", "echo words >&2; exit 3"],
            ["ended with exit code 3; its last message is 'words'"],
        ),
        (["--discover", "kill -9 $$"], ["ended with signal SIGKILL"]),
        (["--discover", "echo 'a:x'"], ["line 1"]),
        (["--node-rank", "1"], ["--node-rank 1: ranks of 1 node go to 0", "--num-nodes"]),
        (
            ["--node-rank", "0", "--rendezvous", "h:1"],
            ["the number of nodes is not set", "--num-nodes N"],
        ),
        (
            ["--node-rank", "1", "--num-nodes", "2"],
            ["the address of node 0 is not set", "--rendezvous"],
        ),
        (
            ["--node-rank", "1", "--num-nodes", "999999", "--master-addr", "m"],
            ["--num-nodes 999,999", "at most"],
        ),
        (["--master-addr=-oX"], ["--master-addr: '-oX' is not a host name"]),
        (
            ["--num-nodes", "2"],
            ["--num-nodes 2: only this machine is known", "--rendezvous HOST:PORT", "--node-rank"],
        ),
        (["--source", "slurm"], ["--source slurm does not apply", "SLURM_JOB_ID"]),
        (["--source", "slrm"], ["--source 'slrm': no such source", "did you mean slurm?"]),
    ],
    ids=lambda value: (
        " ".join(value) if isinstance(value, list) and value[0].startswith("--") else ""
    ),
)
def test_a_contradiction_is_refused_with_the_reason(refused, distlaunch, words, message):
    (distlaunch.work / "empty").touch()
    text = refused(*words, command="train")
    assert all(part in text for part in message), text
    assert not (distlaunch.work / "ran").exists()


def test_plan_refuses_in_the_words_of_train(refused):
    words = ["--hosts", "a:2", "--exclude", "a"]
    assert refused(*words, command="plan") == refused(*words, command="train")


def test_a_mask_counts_if_the_hosts_slots_match(plan):
    (node,) = plan("--hosts", "localhost:2", env={"CUDA_VISIBLE_DEVICES": "4,5"})["nodes"]
    assert (node["slots"], node["devices"]) == (2, ["4", "5"])
    assert {worker["env"]["CUDA_VISIBLE_DEVICES"] for worker in node["workers"]} == {"4,5"}


def test_hosts_may_be_set_by_the_environment_and_are_not_by_torchruns_name(plan, distlaunch):
    assert placed(plan(env={"DISTLAUNCH_HOSTS": "a:1,b:1"})) == [("a", 1, [0]), ("b", 1, [0])]
    result = distlaunch.run(["torchrun", "t.py"], env={"DISTLAUNCH_HOSTS": "a:1,b:1"})
    assert result.stdout == "is 0 1 0 0\n"


def test_a_node_that_is_filtered_out_gets_a_notice(plan):
    notes = plan("--exclude", "n1", env=slurm("gpus-per-node-task-per-node-0"))["notes"]
    assert mentions(notes, "this machine", "n1", "not in")
