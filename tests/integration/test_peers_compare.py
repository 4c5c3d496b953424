"""Questions to other launchers and to distlaunch: no answer differs except those that
docs/differences.md explains."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PAGE = (Path(__file__).parents[2] / "distlaunch" / "docs" / "differences.md").read_text("utf-8")
# Building Horovod takes up to a quarter of an hour, once.
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def script():
    """Return what scripts/compare-peers defines; it puts its folder on the path for its own
    modules."""
    before = list(sys.path)
    names = runpy.run_path(str(SCRIPTS / "compare-peers"))
    sys.path[:] = before
    return names


def unexplained(script, area: str, **pythons: str) -> list[tuple]:
    """Return the cases of an area whose answers differ without a rule, with both answers."""
    script["ours"].PYTHONS.update(pythons)
    cases = [case for case in script["CASES"] if case.area == area]
    assert len(cases) >= 7
    found = script["compare"](cases, pythons)
    explained = [rule for verdict, _, _, rule in found.values() if verdict == "deliberate"]
    assert all(rule.reason in PAGE for rule in explained)
    return [
        (case.name, there, here)
        for case, (verdict, there, here, _) in found.items()
        if verdict == "different"
    ]


@pytest.mark.parametrize(
    "area", ["torchrun_nnodes", "torchrun_rdzv_conf", "torchrun_rdzv_endpoint", "torchrun_std"]
)
def test_torchrun_and_its_drop_in_take_and_refuse_the_same_values(script, area):
    assert unexplained(script, area) == []


def test_scontrol_and_hosts_name_the_same_nodes(script):
    assert unexplained(script, "slurm_nodelist") == []


@pytest.mark.parametrize("area", ["deepspeed_hostfile", "deepspeed_filter", "deepspeed_refuses"])
def test_deepspeed_and_distlaunch_choose_the_same_slots(script, area, deepspeed_python):
    assert unexplained(script, area, deepspeed=deepspeed_python) == []


@pytest.mark.parametrize(
    "area", ["horovod_hosts", "horovod_hostfile", "horovod_assignments", "horovod_settings"]
)
def test_horovodrun_and_distlaunch_place_and_set_the_same(script, area, horovod_python):
    assert unexplained(script, area, horovod=horovod_python) == []


def test_accelerate_launch_and_its_drop_in_set_the_same(script, deepspeed_python):
    assert unexplained(script, "accelerate_settings", deepspeed=deepspeed_python) == []


def test_a_difference_that_nobody_has_explained_is_reported(script):
    case = script["CASES"][0]
    assert script["judge"](case) is None
    answers = {case: ("different", "refused", {"worker-1": 2}, None)}
    assert (
        script["table"](answers).count("\n") == 2
    )  # the head alone: only deliberate differences are listed
