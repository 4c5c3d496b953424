from __future__ import annotations

import pytest

from distlaunch.transport.ray.capacity import (
    RayError,
    bundle_for_each_gpu,
    bundles_without_room,
    describe_shortage,
    error_line,
    strip_log_prefixes,
)
from tests.facts import mentions


def node(name: str, **resources: float):
    return {
        "NodeManagerHostname": name,
        "NodeManagerAddress": f"10.0.0.{len(name)}",
        "Resources": resources,
    }


ONE = {"CPU": 1.0, "GPU": 1.0}


def test_bundles_for_which_no_node_has_room_are_numbered():
    text = describe_shortage(
        [ONE] * 4, "PACK", [node("a", CPU=8, GPU=2), node("bb", CPU=0, GPU=2)], {"CPU": 8, "GPU": 3}
    )
    assert mentions(
        text,
        "2 of 4",
        "(2, 3)",
        "CPU 1, GPU 1",
        "a (10.0.0.1)",
        "CPU 8, GPU 2",
        "bb (10.0.0.2)",
        "CPU 0, GPU 2",
        "free: CPU 8, GPU 3",
    )


def test_bundles_on_nodes_of_their_own_need_as_many_nodes():
    text = describe_shortage(
        [ONE] * 2, "STRICT_SPREAD", [node("a", CPU=8, GPU=8)], {"CPU": 8, "GPU": 8}
    )
    assert mentions(text, "1 of 2", "(1)", "CPU 1, GPU 1", "its own")


def test_resources_in_use_are_distinguished_from_missing_ones():
    text = describe_shortage([ONE], "PACK", [node("a", CPU=8, GPU=1)], {"CPU": 8})
    assert "1 of 1 bundles (0)" in text
    assert mentions(text, "in use", "(PACK)")
    assert text.endswith("free: CPU 8, GPU 0")


def test_many_nodes_and_bundles_are_cut_off():
    text = describe_shortage(
        [ONE] * 100, "PACK", [node(f"n{number}", CPU=0) for number in range(20)], {}
    )
    assert "100 of 100 bundles (0, 1, 2, 3, 4, 5, 6, 7, ...)" in text
    assert "and 12 more" in text


def test_bundles_that_fill_a_node_to_the_last_fraction_have_room():
    assert bundles_without_room([{"CPU": 0.01}] * 100, "PACK", [node("a", CPU=1)]) == []
    assert bundles_without_room([{"CPU": 0.01}] * 101, "PACK", [node("a", CPU=1)]) == [100]
    assert bundles_without_room([{"CPU": 0.0001}] * 2, "PACK", [node("a", CPU=0.0001)]) == [1]


def test_a_cluster_without_nodes_is_reported():
    assert mentions(describe_shortage([ONE], "PACK", [], {}), "no node")


def test_there_is_a_bundle_for_each_gpu_or_an_error_with_the_way_out():
    assert (
        bundle_for_each_gpu([node("a", GPU=2), node("b", CPU=1), node("c", GPU=1)], ONE)
        == [ONE] * 3
    )
    with pytest.raises(RayError, match=r"no node .* GPU"):
        bundle_for_each_gpu([node("b", CPU=1)], ONE)


def test_rays_message_about_a_dead_actor_is_one_line_without_its_numbers():
    died = "The actor died before.\n\tclass_name: AgentActor\n\tactor_id: 37\n\tpid: 24\n\tip: 10.0.0.1\nIt was killed. Exit type: E"
    assert error_line(RuntimeError(died)) == "The actor died before. It was killed. Exit type: E"
    assert error_line(RuntimeError()) == "RuntimeError"
    long = error_line(RuntimeError("word " * 1000))
    assert long.endswith("word ...")
    assert len(long) < 620


@pytest.mark.parametrize(
    "line",
    [
        b"[2026-01-31 10:00:00,123 E 7 9] (driver) core_worker.cc:12: it ended",
        b"[2026-01-31 10:00:00,123 C 7 9] gcs_client.cc:12:  it ended",
        b"2026-01-31 10:00:00,123\tERROR worker.py:12 -- it ended",
        b"\x1b[36m2026-01-31 10:00:00,123 INFO worker.py:12 -- it ended",
        b"it ended",
    ],
)
def test_the_stamps_of_rays_logs_are_left_out(line):
    assert strip_log_prefixes(b"first\n" + line + b"\nlast") == b"first\nit ended\nlast"
