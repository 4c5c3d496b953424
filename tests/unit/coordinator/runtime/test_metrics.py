"""The text of the metrics, read by Prometheus' own parser, and the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from distlaunch.coordinator.runtime.metrics import (
    METRICS,
    MOST_RANKS,
    LauncherUsage,
    metrics_text,
)
from distlaunch.coordinator.runtime.node_questions import Answers, NodeAnswer
from distlaunch.coordinator.runtime.snapshot import JobSnapshot, NodeSnapshot, WorkerSnapshot
from distlaunch.core.model.record import replace
from distlaunch.core.protocol import agent_messages as m

ROOT = Path(__file__).parents[4]
DASHBOARD = ROOT / "scripts" / "examples" / "grafana-job.json"
PAGE = ROOT / "distlaunch" / "docs" / "monitoring.md"
NAMES = {metric.name for metric in METRICS}


def snapshot(ranks: int = 4, *, nodes: int = 2, host: str = "n") -> JobSnapshot:
    per_node = ranks // nodes
    return JobSnapshot(
        job_id='a "job"\\with\nall',
        run_dir="/runs/\udc80",
        backend="pytorch-ddp",
        phase="running",
        attempt=1,
        restarts=1,
        max_restarts=3,
        started=1000.5,
        world_size=ranks,
        workers_up=ranks - 1,
        nodes=tuple(
            NodeSnapshot(
                number=node,
                host=f"{host}{node}",
                first_rank=node * per_node,
                state="lost" if node else "up",
            )
            for node in range(nodes)
        ),
        workers=tuple(
            WorkerSnapshot(
                rank=rank,
                node=rank // per_node,
                host=f"{host}{rank // per_node}",
                pid=100 + rank,
                state="running" if rank else "ended",
                returncode=None,
                step=10.0 + rank,
                step_s=0.5 if rank == 2 else 0.25,
                timed_steps=40.0,
                loss=None if rank == 0 else rank / 10,
                samples=100.0,
                last_sign_age_s=2.0,
            )
            for rank in range(ranks)
        ),
        node_losses=1,
        failures=2,
        output_bytes=12345,
    )


def usage_of(taken: JobSnapshot) -> Answers:
    """Return the answers of the nodes."""
    answers = []
    for node in taken.nodes:
        workers = tuple(
            m.WorkerUsage(
                rank=worker.rank,
                pid=1,
                age_s=1.0,
                processes=1,
                cpu_s=2.5,
                rss_bytes=1 << 20,
                gpu_percent=25.0,
                gpu_bytes=1 << 30,
            )
            for worker in taken.workers
            if worker.node == node.number
        )
        usage = m.Usage(
            attempt=1,
            serial=-1,
            clock_s=1.0,
            agent_cpu_s=1.5,
            cpus=1,
            memory_bytes=1,
            available_bytes=1,
            interfaces=(),
            read_bytes=0,
            written_bytes=0,
            workers=workers,
        )
        answers.append(NodeAnswer(node=node.number, host=node.host, usage=usage))
    return Answers(attempt=1, nodes=tuple(answers), unanswered=())


def samples(taken: JobSnapshot) -> dict[tuple[str, ...], float]:
    """Parse the text. Return the values by name and values of the labels."""
    launcher = LauncherUsage(cpu_s=0.5, memory_bytes=20 << 20, started=999.0)
    text = metrics_text(taken, version="1.2", launcher=launcher, nodes=usage_of(taken), now=2000.0)
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("gauge", "counter")
        for sample in family.samples:
            assert sample.name in NAMES
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


def test_each_metric_has_its_value():
    found = samples(snapshot())
    assert {name for name, *_ in found} == NAMES
    assert found["distlaunch_job_info", 'a "job"\\with\nall', "pytorch-ddp", "/runs/?", "1.2"] == 1
    expected = {
        "distlaunch_workers": 4,
        "distlaunch_workers_up": 3,
        "distlaunch_nodes": 2,
        "distlaunch_nodes_up": 1,
        "distlaunch_restarts_total": 1,
        "distlaunch_restarts_allowed": 3,
        "distlaunch_node_losses_total": 1,
        "distlaunch_worker_failures_total": 2,
        "distlaunch_output_bytes_total": 12345,
        "distlaunch_step": 10,
        "distlaunch_step_highest": 13,
        "distlaunch_step_seconds": 0.25,
        "distlaunch_slowest_step_seconds": 0.5,
        "distlaunch_slowest_rank": 2,
        "distlaunch_loss": 0.1,
        "distlaunch_samples": 400,
        "process_cpu_seconds_total": 0.5,
    }
    assert {name: found[name,] for name in expected} == expected
    assert found["distlaunch_job_phase", "running"] == 1
    assert found["distlaunch_job_phase", "stopping"] == 0
    assert found["distlaunch_agent_cpu_seconds_total", "1", "n1"] == 1.5
    assert found["distlaunch_rank_up", "0", "n0"] == 0
    assert found["distlaunch_rank_step", "3", "n1"] == 13
    assert found["distlaunch_rank_gpu_ratio", "3", "n1"] == 0.25
    assert found["distlaunch_rank_memory_bytes", "0", "n0"] == 1 << 20
    assert found["distlaunch_rank_last_sign_timestamp_seconds", "3", "n1"] == 1998
    assert ("distlaunch_rank_loss", "0", "n0") not in found


def test_values_that_are_not_known_are_left_out():
    taken = replace(
        snapshot(), world_size=None, output_bytes=None, workers=(), nodes=(), phase="connecting"
    )
    found = samples(taken)
    assert ("distlaunch_workers",) not in found
    assert ("distlaunch_step",) not in found
    assert ("distlaunch_output_bytes_total",) not in found
    assert found["distlaunch_nodes",] == 0


def test_ranks_with_equal_step_times_have_no_slowest_one():
    taken = snapshot()
    workers = tuple(
        replace(each, step_s=0.25 + (0.002 if each.rank == 1 else 0)) for each in taken.workers
    )
    found = samples(replace(taken, workers=workers))
    assert ("distlaunch_slowest_rank",) not in found
    assert found["distlaunch_slowest_step_seconds",] == 0.252


@pytest.mark.parametrize("ranks", [MOST_RANKS, 1024])
def test_the_number_of_series_is_bounded(ranks):
    found = samples(snapshot(ranks, nodes=ranks // 8))
    of_ranks = [name for name, *_ in found if name.startswith("distlaunch_rank_")]
    assert bool(of_ranks) == (ranks <= MOST_RANKS)
    assert found["distlaunch_slowest_rank",] == 2
    assert len(found) <= 10 * MOST_RANKS + 256 + 50


def test_the_dashboard_shows_only_metrics_that_exist_with_labels_that_they_have():
    text = DASHBOARD.read_text()
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    shown = set(re.findall(r"\b(?:distlaunch|process)_[a-z_]+", text))
    assert shown
    assert shown <= NAMES
    for panel in json.loads(text)["panels"]:
        for target in panel["targets"]:
            names = set(re.findall(r"\b(?:distlaunch|process)_[a-z_]+", target["expr"]))
            assert names, panel["title"]
            known = set.union(*(labels[name] for name in names)) | {"instance"}
            used = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            used += re.findall(r"(\w+)=~?\"", target["expr"])
            assert set(used) <= known, panel["title"]


def test_the_page_names_every_metric_and_no_other():
    assert set(re.findall(r"`((?:distlaunch|process)_[a-z_]+)`", PAGE.read_text())) == NAMES
