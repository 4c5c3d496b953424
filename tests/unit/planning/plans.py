"""Plans of options and of facts that are written by hand."""

from __future__ import annotations

import pytest

from distlaunch.backends.registry import find_backend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.topology import Gpu, GpuInventory
from distlaunch.planning.build_plan import build_plan
from distlaunch.planning.local_topology import local_topology
from distlaunch.planning.train_options import TrainOptions

TWO = GpuInventory(gpus=(Gpu(index=0, numa_node=0), Gpu(index=1, numa_node=1)), source="nvml")


def plan(make_facts, *, topology=None, facts=None, backend="pytorch-ddp", **options) -> LaunchPlan:
    chosen = TrainOptions(**{"script": "train.py", "num_procs": 2, **options})
    facts = make_facts(**(facts or {}))
    return build_plan(
        chosen,
        facts,
        topology or local_topology(chosen, facts),
        find_backend(backend)({}, {}),
        job_id="job-1",
        run_dir="/r/job-1",
    )


def refused(make_facts, *, facts=None, **options) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(make_facts, facts=facts, **options)
    assert "\n" not in caught.value.message
    return caught.value


def variables(planned: LaunchPlan, rank: int = 0) -> dict[str, str]:
    return {**planned.shared_env, **planned.workers[rank].env}
