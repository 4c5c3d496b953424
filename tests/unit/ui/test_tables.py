"""The printed plan: everything in the record is there, once, and large jobs stay short."""

from __future__ import annotations

import pytest

from distlaunch.ui.tables import plan_table


def record(*, nodes: int = 1, slots: int = 2, cpus: bool = False) -> dict:
    gpus = ",".join(map(str, range(slots)))
    workers = [
        {
            "rank": node * slots + local,
            "local_rank": local,
            "node_rank": node,
            "argv": ["python", "train.py", "--name", "two words"],
            "cpus": [2 * local, 2 * local + 1] if cpus else None,
            "env": {
                "RANK": str(node * slots + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(nodes * slots),
                "MASTER_PORT": None,
                "CUDA_VISIBLE_DEVICES": gpus,
                "ERROR_FILE": f"/jobs/attempt-0/rank-{node * slots + local}.json",
                "TOKEN": "secret",
            },
        }
        for node in range(nodes)
        for local in range(slots)
    ]
    return {
        "job_id": "j1",
        "backend": "pytorch-ddp",
        "attempt": 0,
        "world_size": nodes * slots,
        "nodes": [
            {"node_rank": n, "host": f"host{n}", "slots": slots, "devices": list(range(slots))} for n in range(nodes)
        ],
        "workers": workers,
        "env_given": ["TOKEN"],
        "notes": ["a note"],
        "run_dir": "/jobs/j1",
        "workdir": "/work",
        "master_addr": "10.0.0.1",
        "master_port": None,
        "of_a_later_version": {"x": 1},
    }


@pytest.fixture
def printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def print_it(plan: dict) -> str:
        plan_table(plan)
        return capsys.readouterr().out

    return print_it


def test_a_plan_names_job_size_nodes_command_and_notes(printed):
    text = printed(record())
    for part in (
        "j1",
        "pytorch-ddp",
        "2 workers on 1 node",
        "host0",
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
    text = printed({**record(), "max_restarts": 3, "preload": ["torch", "json"], "hang_timeout_s": 30.0})
    lines = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(names)]
    assert lines == ["3", "torch, json", "stopped after 30 s of silence"]


def test_common_variables_are_written_once_and_varying_ones_as_a_pattern(printed):
    lines = printed(record(nodes=8, slots=8)).splitlines()
    assert "  WORLD_SIZE=64" in lines
    assert "  MASTER_PORT=(settled at the start)" in lines
    assert "  RANK={rank}" in lines
    assert "  LOCAL_RANK={local_rank}" in lines
    assert "  ERROR_FILE=/jobs/attempt-0/rank-{rank}.json" in lines


def test_workers_that_differ_in_numbers_alone_share_a_row(printed):
    text = printed(record(nodes=8, slots=8))
    assert len(text.splitlines()) < 60
    assert [line.split()[:3] for line in text.splitlines() if "0,1,2,3,4,5,6,7" in line and "=" not in line][7] == [
        "56-63",
        "0-7",
        "7",
    ]


def test_workers_with_cpus_of_their_own_get_a_row_each(printed):
    lines = [line.split() for line in printed(record(cpus=True)).splitlines()]
    assert ["0", "0", "0", "0,1", "0-1"] in lines
    assert ["1", "1", "0", "0,1", "2-3"] in lines


def test_a_value_that_follows_no_pattern_is_given_with_its_ranks(printed):
    plan = record(slots=3)
    for worker, value in zip(plan["workers"], ("a", "b", "a"), strict=True):
        worker["env"]["ODD"] = value
    del plan["workers"][1]["env"]["WORLD_SIZE"]
    text = printed(plan)
    assert "  ODD=a (ranks 0,2), b (rank 1)\n" in text
    assert "  WORLD_SIZE=3 (ranks 0,2), (not set) (rank 1)\n" in text


def test_what_the_user_gave_is_named_without_its_value(printed):
    text = printed(record())
    assert "  TOKEN\n" in text
    assert "secret" not in text


def test_long_commands_are_not_broken_and_control_characters_are_escaped(printed):
    plan = record()
    for worker in plan["workers"]:
        worker["argv"] = ["python", "x" * 300, "\x1b[2J"]
    text = printed(plan)
    assert "  python " + "x" * 300 + " '\\x1b[2J'\n" in text


def test_an_empty_record_is_printed_too(printed):
    assert "0 workers on 0 nodes" in printed({})
