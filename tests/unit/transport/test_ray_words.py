from __future__ import annotations

import pytest

from distlaunch.job.transport.ray_words import Problem, lacking, one_for_each_gpu, without_stamps


def node(name: str, **resources: float):
    return {"NodeManagerHostname": name, "NodeManagerAddress": f"10.0.0.{len(name)}", "Resources": resources}


ONE = {"CPU": 1.0, "GPU": 1.0}


def test_bundles_for_which_no_node_has_room_are_numbered():
    text = lacking([ONE] * 4, "PACK", [node("a", CPU=8, GPU=2), node("bb", CPU=0, GPU=2)], {"CPU": 8, "GPU": 3})
    assert text == (
        "Ray has no place for 2 of 4 bundles (2, 3) of CPU 1, GPU 1, for which there is no node with room:"
        " a (10.0.0.1) has CPU 8, GPU 2; bb (10.0.0.2) has CPU 0, GPU 2; free: CPU 8, GPU 3"
    )


def test_bundles_on_nodes_of_their_own_need_as_many_nodes():
    text = lacking([ONE] * 2, "STRICT_SPREAD", [node("a", CPU=8, GPU=8)], {"CPU": 8, "GPU": 8})
    assert "1 of 2 bundles (1) of CPU 1, GPU 1, for which there is no node of its own" in text


def test_what_others_have_is_told_from_what_is_not_there():
    text = lacking([ONE], "PACK", [node("a", CPU=8, GPU=1)], {"CPU": 8})
    assert "1 of 1 bundles (0)" in text
    assert "which are in use, or not free together (PACK)" in text
    assert text.endswith("free: CPU 8, GPU 0")


def test_many_nodes_and_bundles_are_cut_off():
    text = lacking([ONE] * 100, "PACK", [node(f"n{number}", CPU=0) for number in range(20)], {})
    assert "100 of 100 bundles (0, 1, 2, 3, 4, 5, 6, 7, ...)" in text
    assert "and 12 more" in text


def test_a_cluster_without_nodes_says_so():
    assert "no node is there" in lacking([ONE], "PACK", [], {})


def test_there_is_a_bundle_for_each_gpu_or_an_error_with_the_way_out():
    assert one_for_each_gpu([node("a", GPU=2), node("b", CPU=1), node("c", GPU=1)], ONE) == [ONE] * 3
    with pytest.raises(Problem, match="no node of the Ray cluster has a GPU"):
        one_for_each_gpu([node("b", CPU=1)], ONE)


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
    assert without_stamps(b"first\n" + line + b"\nlast") == b"first\nit ended\nlast"
