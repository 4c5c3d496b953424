from __future__ import annotations

import pytest

from distlaunch.cli.commands.plan_tables import plan_table


def record(*, nodes: int = 1, slots: int = 2, cpus: bool = False, isolated: bool = False) -> dict:
    gpus = list(map(str, range(slots)))

    def worker(node: int, local: int) -> dict:
        rank = node * slots + local
        return {
            "rank": rank,
            "local_rank": local,
            "argv": ["python", "train.py", "--name", "two words"],
            "cpus": [2 * local, 2 * local + 1] if cpus else None,
            "env": {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "CUDA_VISIBLE_DEVICES": gpus[local] if isolated else ",".join(gpus),
                "ERROR_FILE": f"/jobs/attempt-0/rank-{rank}.json",
                "TOKEN": "secret",
            },
        }

    return {
        "job_id": "j1",
        "source": "slurm",
        "backend": "pytorch-ddp",
        "device": "cuda",
        "attempt": 0,
        "world_size": nodes * slots,
        "min_nodes": nodes,
        "max_nodes": nodes,
        "env": {"WORLD_SIZE": str(nodes * slots), "OMP_NUM_THREADS": None, "TOKEN": "secret"},
        "env_given": ["TOKEN"],
        "notes": ["a note"],
        "run_dir": "/jobs/j1",
        "workdir": "/work",
        "master_addr": "10.0.0.1",
        "master_port": None,
        "nodes": [
            {
                "host": f"n{node + 1:02d}",
                "node_rank": node,
                "slots": slots,
                "devices": gpus,
                "workers": [worker(node, local) for local in range(slots)],
            }
            for node in range(nodes)
        ],
        "of_a_later_version": {"x": 1},
    }


@pytest.fixture
def printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def print_it(plan: dict, **more: object) -> str:
        plan_table(plan, **more)
        return capsys.readouterr().out

    return print_it


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_plan_names_job_size_nodes_command_and_notes(printed):
    text = printed(record())
    for part in (
        "j1",
        "slurm",
        "pytorch-ddp",
        "2 workers on 1 node\n",
        "n01",
        "/jobs/j1",
        "a note",
        "/work",
        "10.0.0.1, port (settled",
    ):
        assert part in text
    assert "  python train.py --name 'two words'\n" in text


def test_restarts_preload_and_hang_timeout_have_a_line_if_they_are_set(printed):
    names = ("Restarts", "Preload", "Hangs")
    assert not any(line.startswith(names) for line in printed(record()).splitlines())
    text = printed(
        {**record(), "max_restarts": 3, "preload": ["torch", "json"], "hang_timeout_s": 30.0}
    )
    lines = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(names)]
    assert lines == ["3", "torch, json", "stopped after 30 s of silence"]
    text = printed({**record(), "hang_timeout_s": 30.0, "hang_action": "report"})
    assert "reported after 30 s of silence" in text


def test_common_variables_are_written_once_and_varying_ones_as_a_pattern(printed):
    lines = printed(record(nodes=8, slots=8)).splitlines()
    assert "  WORLD_SIZE=64" in lines
    assert "  OMP_NUM_THREADS=(settled at the start)" in lines
    assert "  RANK={rank}" in lines
    assert "  LOCAL_RANK={local_rank}" in lines
    assert "  ERROR_FILE=/jobs/attempt-0/rank-{rank}.json" in lines


def test_equal_nodes_and_workers_share_a_row(printed):
    text = printed(record(nodes=64, slots=8))
    assert len(text.splitlines()) < 50
    assert ["0-63", "n[01-64]", "8", "0-511", "0-7", "any"] in rows(text)
    assert ["0-511", "0-7", "0-63", "0,1,2,3,4,5,6,7", "any"] in rows(text)


def test_nodes_that_differ_have_rows_of_their_own(printed):
    plan = record(nodes=4, slots=2)
    plan["nodes"][1].update(slots=1, devices=["3"], workers=plan["nodes"][1]["workers"][:1])
    plan["nodes"][3].update(user="me", port=2222)
    text = rows(printed(plan))
    assert ["0,2", "n[01,03]", "2", "0-1,4-5", "0-1", "any"] in text
    assert ["1", "n02", "1", "2", "3", "any"] in text
    assert ["3", "me@n04:port=2222", "2", "6-7", "0-1", "any"] in text


def test_many_kinds_of_nodes_do_not_fill_the_screen(printed):
    plan = record(nodes=300, slots=1)
    for place, node in enumerate(plan["nodes"]):
        node["devices"] = [f"GPU-{place}"]
    text = printed(plan)
    assert "and 260 nodes of 260 more kinds" in text
    assert len(text.splitlines()) < 120


def test_many_ranks_are_cut_short(printed):
    text = printed(record(nodes=64, slots=8, isolated=True))
    assert max(map(len, text.splitlines())) <= 120
    assert "0,8,16,24,32" in text
    assert "504" not in text


def test_workers_with_cpus_of_their_own_get_a_row_each(printed):
    lines = rows(printed(record(cpus=True)))
    assert ["0", "0", "0", "0,1", "0-1"] in lines
    assert ["1", "1", "0", "0,1", "2-3"] in lines
    assert ["0", "n01", "2", "0-1", "0-1", "0-3"] in lines


def gpus_of(devices: list[str]) -> list[dict]:
    return [
        {"device": each, "index": 4 + place, "uuid": f"GPU-{place}", "name": "H100"}
        for place, each in enumerate(devices)
    ]


def test_physical_logical_and_uuid_of_each_gpu_are_shown_where_they_are_known(printed):
    plan = record()
    plan["nodes"][0]["gpus"] = gpus_of(["0", "1"])
    lines = rows(printed(plan))
    assert ["Local", "ranks", "Logical", "Physical", "UUID", "Name"] in lines
    assert ["0", "0", "4", "GPU-0", "H100"] in lines
    assert ["1", "1", "5", "GPU-1", "H100"] in lines


def test_an_isolated_worker_knows_its_gpu_as_the_first(printed):
    plan = record(isolated=True)
    plan["nodes"][0]["gpus"] = gpus_of(["0", "1"])
    lines = rows(printed(plan))
    assert ["0", "0", "4", "GPU-0", "H100"] in lines
    assert ["1", "0", "5", "GPU-1", "H100"] in lines


def test_workers_that_share_a_gpu_stand_beside_it(printed):
    plan = record(slots=2)
    plan["nodes"][0]["devices"] = ["7", "7"]
    plan["nodes"][0]["gpus"] = [*gpus_of(["7"]), *gpus_of(["7"])]
    for worker in plan["nodes"][0]["workers"]:
        worker["env"]["CUDA_VISIBLE_DEVICES"] = "7"
    assert ["0-1", "0", "4", "GPU-0", "H100"] in rows(printed(plan))


@pytest.mark.parametrize(
    ("node", "device", "shown"),
    [
        ({"slots": 8, "devices": None}, "cuda", " 0-7 "),
        ({"slots": 8, "devices": None}, "auto", "0-7, if it has any"),
        ({"slots": None, "devices": None}, "auto", "all, if it has any"),
        ({"slots": 2, "devices": None, "chosen": [1, 3]}, "cuda", "1,3"),
        ({"slots": None, "devices": None, "without": [0]}, "cuda", "all but 0"),
        ({"slots": 2, "devices": ["3", "1"]}, "cuda", "3,1"),
        ({"slots": 1, "devices": ["MIG-x"]}, "cuda", "MIG-x"),
        ({"slots": 1, "devices": []}, "cpu", " - "),
    ],
)
def test_gpus_of_a_node_are_named_or_counted(printed, node, device, shown):
    text = printed(
        {
            **record(),
            "device": device,
            "nodes": [{"host": "a", "node_rank": 0, "workers": None, **node}],
        }
    )
    assert shown in text


def test_facts_that_only_nodes_know_are_open(printed):
    plan = record(nodes=2)
    plan.update(world_size=None, master_addr=None)
    plan["nodes"][1].update(slots=None, devices=None, workers=None)
    text = printed(plan)
    assert "workers: settled at the start on 2 nodes" in text
    assert "Master     (settled at the start), port (settled" in text
    (row,) = [line for line in text.splitlines() if " n02 " in line]
    assert row.count("(settled at the start)") == 2, "workers and ranks"


def test_the_command_is_shown_where_no_number_of_workers_is_known(printed):
    plan = record(nodes=2)
    for node in plan["nodes"]:
        node.update(slots=None, devices=None, workers=None)
    text = printed(plan, argv=("python", "a b.py"))
    assert "\nWorkers\n  (settled at the start)\n\nCommand\n  python 'a b.py'\n" in text


def test_an_elastic_job_shows_its_bounds(printed):
    assert "on 2 nodes (elastic: 1 to 4)" in printed(
        {**record(nodes=2), "min_nodes": 1, "max_nodes": 4}
    )


def test_a_value_that_follows_no_pattern_is_given_with_its_ranks(printed):
    plan = record(slots=3)
    for worker, value in zip(plan["nodes"][0]["workers"], ("a", "b", "a"), strict=True):
        worker["env"]["ODD"] = value
    del plan["nodes"][0]["workers"][1]["env"]["ERROR_FILE"]
    text = printed(plan)
    assert "  ODD=a (ranks 0,2), b (rank 1)\n" in text
    assert "(not set) (rank 1)" in text


def test_a_given_variable_is_named_without_its_value(printed):
    text = printed(record())
    assert "  TOKEN\n" in text
    assert "secret" not in text


def test_long_commands_are_not_broken_and_control_characters_are_escaped(printed):
    plan = record()
    for worker in plan["nodes"][0]["workers"]:
        worker["argv"] = ["python", "x" * 300, "\x1b[2J"]
    text = printed(plan)
    assert "  python " + "x" * 300 + " '\\x1b[2J'\n" in text


def test_commands_that_differ_are_given_with_their_ranks(printed):
    plan = record(slots=3)
    plan["nodes"][0]["workers"][1]["argv"] = ["other"]
    text = printed(plan)
    assert "  ranks 0,2: python train.py" in text
    assert "  rank 1: other\n" in text


def test_an_empty_record_is_printed_too(printed):
    assert "0 workers on 0 nodes" in printed({})
