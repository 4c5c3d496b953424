from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.core.model.topology import CpuInventory
from distlaunch.planning.surveyed_nodes import NodesDifferError
from tests.facts import mentions


def names(made) -> list[str]:
    return [node.host for node in made.hosts]


def composed(make_planner, make_surveys, *, away=(), changed=None, **options):
    """Plan with all hosts but those away. ``changed`` has changed fields of surveys by host."""
    made = make_planner(**options)
    surveys = {
        number: reported
        for number, reported in make_surveys(made).items()
        if made.hosts[number].host not in away
    }
    for number in surveys:
        if (other := (changed or {}).get(made.hosts[number].host)) is not None:
            surveys[number] = make_surveys(made, **other)[number]
    node_numbers, plan = made.plan_attempt(surveys)
    return [made.hosts[number].host for number in node_numbers], plan


def sizes(plan) -> list[int]:
    return [node.slots for node in plan.nodes]


# --- who takes part


def test_hosts_train_in_the_order_of_the_list_and_ranks_are_contiguous(make_planner, make_surveys):
    hosts, plan = composed(make_planner, make_surveys, hosts="b:2,a,c:3")
    assert hosts == ["b", "a", "c"]
    assert sizes(plan) == [2, 1, 3]
    assert [(w.rank, w.node_rank, w.local_rank) for w in plan.workers] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 2, 0),
        (4, 2, 1),
        (5, 2, 2),
    ]
    assert (plan.world_size, plan.env["WORLD_SIZE"], plan.env["GROUP_WORLD_SIZE"]) == (6, "6", "3")
    assert (plan.master_addr, plan.master_port, plan.env.get("MASTER_PORT")) == ("b", None, None)


@pytest.mark.parametrize(
    ("options", "training", "spares", "bounds"),
    [
        ({"hosts": "a,b,c"}, 3, 0, (3, 3)),
        ({"hosts": "a,b,c", "spares": 1}, 2, 1, (2, 2)),
        ({"hosts": "a,b,c,d", "spares": 1, "num_nodes": 2}, 2, 1, (2, 2)),
        ({"hosts": "a,b,c,d", "num_nodes": (2, 3)}, 3, 0, (2, 3)),
        ({"hosts": "a,b,c,d", "num_nodes": (2, 4), "spares": 1}, 3, 1, (2, 4)),
        ({"hosts": "a,b,c,d,e", "num_nodes": (1, 3), "spares": 1}, 3, 1, (1, 3)),
        ({"hosts": "a:4,b:4,c:4", "num_procs": 8}, 2, 0, (2, 2)),
        ({"hosts": "a:4,b:4,c:4", "num_procs": 8, "spares": 1}, 2, 1, (2, 2)),
        ({"hosts": "a"}, 1, 0, (1, 1)),
    ],
)
def test_spares_are_the_hosts_after_those_that_train(
    make_planner, options, training, spares, bounds
):
    made = make_planner(**options)
    assert (len(made.hosts), made.spares, made.bounds) == (training + spares, spares, bounds)
    assert names(made) == list("abcdef")[: training + spares]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": "a,b", "spares": 2}, ("--spares 2", "2 hosts, a,b")),
        (
            {"hosts": "a,b,c", "spares": 2, "num_nodes": 2},
            ("--num-nodes 2 and --spares 2", "3 hosts"),
        ),
        (
            {"hosts": "a,b,c", "spares": 2, "num_nodes": (2, 4)},
            ("--num-nodes 2:4 and --spares 2", "3 hosts"),
        ),
    ],
)
def test_too_few_hosts_for_the_spares_are_refused(make_planner, options, words):
    with pytest.raises(ConfigError) as caught:
        make_planner(**options)
    assert all(word in caught.value.message for word in words)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("away", "expected"),
    [("", ["a", "b"]), ("a", ["b", "c"]), ("b", ["a", "c"]), ("c", ["a", "b"]), ("ab", ["c", "d"])],
)
def test_a_spare_takes_the_place_of_a_host_that_is_not_there(
    make_planner, make_surveys, away, expected
):
    hosts, plan = composed(
        make_planner, make_surveys, hosts="a:2,b:2,c:2,d:2", num_nodes=2, spares=2, away=away
    )
    assert hosts == expected
    assert [worker.rank for worker in plan.workers] == [0, 1, 2, 3]
    assert [node.host for node in plan.spares] == [
        each for each in "abcd" if each not in away and each not in expected
    ]


@pytest.mark.parametrize(
    ("away", "expected"), [("", ["a", "b", "c"]), ("a", ["b", "c"]), ("ac", ["b"])]
)
def test_an_elastic_job_takes_who_is_there(make_planner, make_surveys, away, expected):
    hosts, plan = composed(
        make_planner, make_surveys, hosts="a:1,b:2,c:1", num_nodes=(1, 3), away=away
    )
    assert hosts == expected
    assert plan.env["WORLD_SIZE"] == str(sum(sizes(plan)))
    assert (plan.bounds, plan.workers[-1].rank) == ((1, 3), sum(sizes(plan)) - 1)


def test_too_few_that_are_there_are_no_configuration_error(make_planner, make_surveys):
    with pytest.raises(NodesError, match=r"1 node .* 2") as caught:
        composed(make_planner, make_surveys, hosts="a,b,c", num_nodes=(2, 3), away="ac")
    assert caught.value.exit_code == 69


def test_a_total_that_the_nodes_that_are_there_cannot_hold(make_planner, make_surveys):
    options = {"hosts": "a:4,b:4,c:2", "num_procs": 8, "spares": 1}
    hosts, plan = composed(make_planner, make_surveys, **options)
    assert (hosts, sizes(plan)) == (["a", "b"], [4, 4])
    with pytest.raises(NodesError, match=r"--num-procs 8: .* 6 slots .* 2 hosts"):
        composed(make_planner, make_surveys, away="b", **options)


def test_the_numbers_of_the_hosts_stay_when_others_take_part(make_planner, make_surveys):
    made = make_planner(hosts="a:2,b:2,c:2", num_nodes=(1, 3))
    surveys = make_surveys(made)
    assert made.plan_attempt({0: surveys[0], 2: surveys[2]})[0] == (0, 2)
    node_numbers, plan = made.plan_attempt(surveys)
    assert node_numbers == (0, 1, 2)
    assert [node.host for node in plan.nodes] == ["a", "b", "c"]


# --- what only a node knows


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hosts": "a,b", "procs_per_node": 3}, [3, 3]),
        ({"hosts": "a:4,b:2", "procs_per_node": 2}, [2, 2]),
        ({"hosts": "a:4,b:4", "num_nodes": 2, "num_procs": 6}, [3, 3]),
        ({"hosts": "a:1,b:3", "device": "cpu"}, [1, 3]),
        ({"hosts": "a,b", "device": "cpu"}, [1, 1]),
        ({"hosts": "a,b"}, [1, 1]),
        ({"hosts": "a:3,b"}, [3, 1]),
        ({"hosts": "a:4,b:4", "exclude": "a:0,1"}, [2, 4]),
        ({"hosts": "a:4,b:4", "num_procs": 6, "spread": True}, [3, 3]),
    ],
)
def test_cpu_workers_are_as_many_as_asked(make_planner, make_surveys, options, expected):
    _, plan = composed(make_planner, make_surveys, **options)
    assert (sizes(plan), plan.device) == (expected, "cpu")
    assert {worker.env["CUDA_VISIBLE_DEVICES"] for worker in plan.workers} == {""}


def test_threads_and_cpus_are_of_each_node(make_planner, make_surveys):
    small = CpuInventory(allowed=(4, 5), online=2)
    _, plan = composed(
        make_planner, make_surveys, hosts="a:2,b:2", bind="cores", changed={"b": {"cpus": small}}
    )
    assert [worker.cpus for worker in plan.workers] == [
        tuple(range(8)),
        tuple(range(8, 16)),
        (4,),
        (5,),
    ]
    assert [worker.env["OMP_NUM_THREADS"] for worker in plan.workers] == ["8", "8", "1", "1"]


def test_a_grant_of_cpus_on_a_node_limits_its_threads(make_planner, make_surveys):
    _, plan = composed(
        make_planner, make_surveys, hosts="a:2,b:2", changed={"b": {"granted_cpus": 4}}
    )
    assert [worker.env["OMP_NUM_THREADS"] for worker in plan.workers] == ["8", "8", "2", "2"]


def test_threads_that_the_user_set_stay(make_planner, make_surveys):
    _, plan = composed(make_planner, make_surveys, hosts="a:2,b:2", env=("OMP_NUM_THREADS=3",))
    assert all("OMP_NUM_THREADS" not in worker.env for worker in plan.workers)
    assert plan.shared_env["OMP_NUM_THREADS"] == "3"


def test_a_pinned_agent_is_reported_with_its_node(make_planner, make_surveys):
    pinned = CpuInventory(allowed=(3,), online=64)
    _, plan = composed(
        make_planner,
        make_surveys,
        hosts="a,b,c",
        changed={"b": {"cpus": pinned}, "c": {"cpus": pinned}},
    )
    (pinned_note,) = (note for note in plan.notes if "pinned" in note)
    assert mentions(pinned_note, "b,c", "1 of 64")


def test_notes_are_reported_once_for_all_nodes(make_planner, make_surveys):
    _, plan = composed(make_planner, make_surveys, hosts="n[1-4],x", num_nodes=4)
    unused, without_gpus = plan.notes
    assert mentions(unused, "--num-nodes 4", "x")
    assert mentions(without_gpus, "no GPU", "--procs-per-node")


# --- the interpreter


def test_our_interpreter_is_the_workers_where_it_is(make_planner, make_surveys):
    made = make_planner(hosts="a,b")
    assert made.survey(7).pythons == ("/usr/bin/python3", "python3")
    _, plan = made.plan_attempt(make_surveys(made))
    assert plan.argv == ("/usr/bin/python3", "train.py")
    assert [node.argv for node in plan.nodes] == [None, None]


def test_another_interpreter_on_some_nodes_is_reported_once(make_planner, make_surveys):
    elsewhere = {"python": "/opt/bin/python3"}
    _, plan = composed(
        make_planner,
        make_surveys,
        hosts="a,b,c",
        script_args=("--x", "1"),
        changed={"b": elsewhere, "c": elsewhere},
    )
    assert plan.argv == ("/usr/bin/python3", "train.py", "--x", "1")
    other = ("/opt/bin/python3", "train.py", "--x", "1")
    assert [node.argv for node in plan.nodes] == [None, other, other]
    (note,) = [note for note in plan.notes if "the launcher's" in note]
    assert mentions(note, "/usr/bin/python3", "/opt/bin/python3", "/usr/bin/python3", "--python")
    record = plan.record()["nodes"][1]["workers"][0]
    assert record["argv"] == list(other)


def test_with_setup_the_interpreter_that_it_brings_runs_where_ours_is_not(
    make_planner, make_surveys
):
    made = make_planner(hosts="a,b", setup="source env/bin/activate")
    assert (made.survey(0).program, made.survey(0).pythons) == (
        "bash",
        ("/usr/bin/python3", "python3"),
    )
    surveys = make_surveys(made)
    surveys[1] = make_surveys(made, python=None)[1]
    _, plan = made.plan_attempt(surveys)
    assert plan.argv[:2] == ("bash", "-l")
    assert plan.argv[-2:] == ("/usr/bin/python3", "train.py")
    assert plan.nodes[1].argv[:-2] == plan.argv[:-2]
    assert plan.nodes[1].argv[-2:] == ("python3", "train.py")
    assert any(mentions(note, "--setup") and "python3 on b" in note for note in plan.notes)


def test_the_users_interpreter_is_taken_as_it_is_typed(make_planner, make_surveys):
    made = make_planner(hosts="a,b", python="/opt/py/bin/python")
    assert made.survey(0).pythons == ("/opt/py/bin/python",)
    _, plan = made.plan_attempt(make_surveys(made, python="/opt/py/bin/python"))
    assert plan.argv[0] == "/opt/py/bin/python"
    assert [node.argv for node in plan.nodes] == [None, None]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"script": "train.py"}, ("train.py", "", ("/usr/bin/python3", "python3"))),
        ({"script": "pkg.train", "module": True}, ("", "", ("/usr/bin/python3", "python3"))),
        ({"script": "./run", "no_python": True}, ("", "/w/./run", ("/usr/bin/python3",))),
        ({"script": "run", "no_python": True}, ("", "run", ("/usr/bin/python3",))),
        ({"script": "run", "no_python": True, "setup": "x"}, ("", "bash", ("/usr/bin/python3",))),
    ],
)
def test_the_survey_asks_for_what_the_workers_run(make_planner, options, expected):
    asked = make_planner(hosts="a,b", **options).survey(3)
    assert (asked.script, asked.program, asked.pythons) == expected
    assert (asked.serial, asked.workdir, asked.run_dir, asked.gpus, asked.topology) == (
        3,
        "/w",
        "/r/job-1",
        True,
        False,
    )


def test_from_a_laptop_script_and_directory_need_not_be_here(make_planner, make_surveys):
    made = make_planner(hosts="a,b", script="src/other.py", workdir="/scratch/me")
    asked = made.survey(0)
    assert (asked.workdir, asked.script) == ("/scratch/me", "src/other.py")
    _, plan = made.plan_attempt(make_surveys(made))
    assert (plan.workdir, plan.argv[1]) == ("/scratch/me", "src/other.py")


def test_on_one_of_the_nodes_the_script_is_looked_for_here(make_planner):
    with pytest.raises(ConfigError, match=r"other\.py"):
        make_planner(hosts="a,b", identity="b", script="other.py")
    made = make_planner(hosts="a,b", identity="b")
    assert (made.here, made.survey(0).script) == (1, "train.py")


# --- one script on all nodes


def test_scripts_that_differ_name_the_nodes_of_the_minority(make_planner, make_surveys):
    with pytest.raises(NodesDifferError) as caught:
        composed(
            make_planner,
            make_surveys,
            hosts="a,b,c,d",
            changed={"b": {"script_sha256": "cd" * 32}},
        )
    assert caught.value.nodes == (1,)
    assert mentions(caught.value.message, "train.py", "cdcdcdcd", "b", "abababab", "a,c,d")
    assert caught.value.exit_code == 2
    assert "--workdir" in caught.value.hint


def test_scripts_that_differ_are_compared_with_ours_where_we_are_a_node(make_planner, make_surveys):
    with pytest.raises(NodesDifferError, match=r"abababab on b,c, but cdcdcdcd on a") as caught:
        composed(
            make_planner,
            make_surveys,
            hosts="a,b,c",
            identity="a",
            changed={"a": {"script_sha256": "cd" * 32}},
        )
    assert caught.value.nodes == (1, 2)


def test_a_script_that_is_missing_somewhere_names_where(make_planner, make_surveys):
    with pytest.raises(NodesDifferError, match=r"train\.py .* \(directory: /w\)") as caught:
        composed(make_planner, make_surveys, hosts="a,b", changed={"b": {"script_sha256": None}})
    assert caught.value.nodes == (1,)


def test_modules_and_programs_are_not_compared(make_planner, make_surveys):
    other = {"b": {"script_sha256": None}}
    composed(make_planner, make_surveys, hosts="a,b", script="m", module=True, changed=other)
    composed(make_planner, make_surveys, hosts="a,b", script="run", no_python=True, changed=other)


def test_spares_need_not_have_the_same_script(make_planner, make_surveys):
    hosts, _ = composed(
        make_planner, make_surveys, hosts="a,b,c", spares=1, changed={"c": {"script_sha256": None}}
    )
    assert hosts == ["a", "b"]


# --- hosts that come and go


def test_discovered_hosts_get_the_next_numbers_and_others_keep_theirs(make_planner, make_surveys):
    made = make_planner(discover="cmd", discovered="a:1\nb:1\n", num_nodes=(1, 4))
    assert names(made) == ["a", "b"]
    assert [node.host for node in made.update_hosts("c:2\nb:1\n")] == ["b", "c"]
    assert names(made) == ["a", "b", "c"]
    node_numbers, plan = made.plan_attempt(make_surveys(made))
    assert (node_numbers, sizes(plan)) == ((1, 2), [1, 2])
    assert [node.host for node in made.update_hosts("a:1\nb:3\nc:2\n")] == ["a", "b", "c"]
    node_numbers, plan = made.plan_attempt(make_surveys(made))
    assert (node_numbers, sizes(plan)) == ((0, 1, 2), [1, 3, 2])


def test_no_more_than_the_most_are_to_be_reached(make_planner):
    made = make_planner(discover="cmd", discovered="a\nb\n", num_nodes=(1, 2), spares=0)
    assert [node.host for node in made.update_hosts("a\nb\nc\nd\n")] == ["a", "b"]
    assert [node.host for node in made.update_hosts("c\nd\n")] == ["c", "d"]
    assert names(made) == ["a", "b", "c", "d"]


def test_few_or_no_hosts_for_a_while_are_no_error(make_planner, make_surveys):
    made = make_planner(discover="cmd", discovered="a\nb\nc\n", num_nodes=(2, 3))
    assert [node.host for node in made.update_hosts("b\n")] == ["b"]
    with pytest.raises(NodesError):
        made.plan_attempt(make_surveys(made))
    assert made.update_hosts("# none now\n") == ()
    assert [node.host for node in made.update_hosts("a\nc\n")] == ["a", "c"]
    assert made.plan_attempt(make_surveys(made))[0] == (0, 2)


def test_an_invalid_list_of_hosts_is_refused_and_changes_nothing(make_planner):
    made = make_planner(discover="cmd", discovered="a\nb\n", num_nodes=(1, 3))
    with pytest.raises(ConfigError):
        made.update_hosts("a:x:y:z\n")
    assert names(made) == ["a", "b"]


# --- what the runner gets


def test_the_folder_that_the_job_got_in_the_end_is_in_each_plan(make_planner, make_surveys):
    made = make_planner(hosts="a,b")
    assert made.set_job("job-1-2", "/r/job-1-2") is made
    _, plan = made.plan_attempt(make_surveys(made))
    assert (plan.run_dir, plan.env["DISTLAUNCH_RUN_DIR"]) == ("/r/job-1-2", "/r/job-1-2")
    assert (
        plan.workers[1].env["TORCHELASTIC_ERROR_FILE"] == "/r/job-1-2/attempt-0/rank-1.error.json"
    )
    assert made.survey(0).run_dir == "/r/job-1-2"


def test_one_remote_node_needs_no_rendezvous(make_planner, make_surveys):
    hosts, plan = composed(make_planner, make_surveys, hosts="a:2")
    assert (hosts, plan.master_addr, plan.env["MASTER_ADDR"]) == (["a"], "127.0.0.1", "127.0.0.1")


def test_this_machine_may_be_discovered_later(make_planner):
    made = make_planner(discover="cmd", discovered="a\nb\n", num_nodes=(1, 3))
    assert (made.here, made.is_here("a"), made.is_here("laptop")) == (None, False, True)
    assert [node.host for node in made.update_hosts("a\nlaptop\n")] == ["a", "laptop"]
    assert made.here == 2


def test_filters_may_name_hosts_that_have_gone(make_planner, make_surveys):
    made = make_planner(discover="cmd", discovered="a\nb\nbad\n", exclude="bad", num_nodes=(1, 3))
    assert names(made) == ["a", "b"]
    assert [node.host for node in made.update_hosts("b\nc\n")] == ["b", "c"]
    assert made.plan_attempt(make_surveys(made))[0] == (1, 2)
    assert [node.host for node in made.update_hosts("bad\nc\n")] == ["c"]
    assert made.plan_attempt(make_surveys(made))[0] == (2,)


def test_a_schedulers_grant_limits_this_machine_alone(make_planner, make_surveys):
    pbs = {"PBS_JOBID": "1.s", "PBS_NODEFILE": "/nodes", "NCPUS": "4"}
    made = make_planner(environ=pbs, texts={"/nodes": "a\na\nb\nb\n"}, identity="a", device="cpu")
    _, plan = made.plan_attempt(make_surveys(made))
    assert [worker.env["OMP_NUM_THREADS"] for worker in plan.workers] == ["2", "2", "8", "8"]
    assert (plan.source, plan.job_id) == ("pbs", "job-1")


def test_one_notice_names_other_interpreters_and_pinned_agents(make_planner, make_surveys):
    made = make_planner(hosts="a,b,c", num_nodes=(1, 3))
    other = make_surveys(made, python="/opt/python3", cpus=CpuInventory(allowed=(3,), online=64))
    surveys = {**make_surveys(made), 1: other[1]}
    _, first = made.plan_attempt(surveys)
    pinned, interpreters = (note for note in first.notes if "pinned" in note or "--python" in note)
    assert mentions(pinned, "b", "1 of 64")
    assert mentions(interpreters, "/usr/bin/python3", "a,c", "/opt/python3", "b", "--python")
    _, again = made.plan_attempt({0: surveys[0], 1: surveys[1]})
    assert not [note for note in again.notes if "pinned" in note or "the launcher's" in note]
    _, third = made.plan_attempt({1: other[1], 2: other[2]})
    assert [note.partition(":")[0] for note in third.notes if "pinned" in note] == ["c"]
    assert [note.partition(":")[0] for note in third.notes if "the launcher's" in note] == [
        "workers run /opt/python3 on c"
    ]
