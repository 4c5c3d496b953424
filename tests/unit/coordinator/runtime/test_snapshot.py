from __future__ import annotations

import json

import pytest

from distlaunch.coordinator.runtime.snapshot import REUSE_S, Snapshots, take_snapshot
from distlaunch.core.model.plan import OuterLauncher
from distlaunch.core.model.record import plain, replace
from distlaunch.core.protocol import agent_messages as m


@pytest.fixture
def job(make_nodes):
    return make_nodes(2, max_restarts=2)


def snapshot(job, *, outer: OuterLauncher | None = None):
    plan = replace(job.composed[-1].plan, outer=outer)
    return take_snapshot(job.policy, plan, run_dir="/runs/1", started=1000.0, now=job.now)


def beat(job, rank: int, **values: float) -> None:
    heartbeats = (m.Heartbeat(rank=rank, values=values),)
    alive = m.Alive(attempt=job.attempt, heartbeats=heartbeats, wrote=())
    job.say(job.joined_launcher_of(rank), alive)


def test_workers_are_starting_then_running_then_ended(job):
    job.begin()
    job.gather()
    assert [worker.state for worker in snapshot(job).workers] == ["starting"] * 4
    job.come_up()
    shot = snapshot(job)
    assert (shot.phase, shot.world_size, shot.workers_up) == ("running", 4, 4)
    assert [(worker.rank, worker.node, worker.host, worker.pid) for worker in shot.workers] == [
        (0, 0, "n0", 1000),
        (1, 0, "n0", 1001),
        (2, 1, "n1", 1002),
        (3, 1, "n1", 1003),
    ]
    job.exited(1)
    job.exited(2, 7)
    shot = snapshot(job)
    assert [(worker.state, worker.returncode) for worker in shot.workers] == [
        ("running", None),
        ("ended", 0),
        ("ended", 7),
        ("running", None),
    ]
    assert (shot.workers_up, shot.failures) == (2, 1)


def test_a_lost_node_and_its_workers_are_lost_and_those_that_ended_before_keep_their_code(job):
    job.run()
    job.exited(2, 0)
    job.lost(1)
    shot = snapshot(job)
    assert [node.state for node in shot.nodes] == ["up", "lost"]
    assert [(worker.state, worker.returncode) for worker in shot.workers[2:]] == [
        ("ended", 0),
        ("lost", None),
    ]
    assert shot.node_losses == 1


def test_counts_go_on_through_a_restart_and_told_workers_do_not_count(job):
    job.run()
    job.fail()
    job.gather()
    job.come_up()
    shot = snapshot(job)
    assert (shot.attempt, shot.restarts, shot.failures) == (1, 1, 1)
    assert {worker.state for worker in shot.workers} == {"running"}


def test_numbers_of_heartbeats_and_the_age_of_the_last_sign_of_life(job):
    job.run()
    for step in range(20):
        job.now += 1.0
        beat(job, 0, step=step * 2.0, loss=0.5, samples=64.0)
    job.now += 3.0
    zero, one, *_ = snapshot(job).workers
    assert (zero.step, zero.loss, zero.samples) == (38.0, 0.5, 64.0)
    assert zero.step_s == pytest.approx(0.5)
    assert (zero.last_sign_age_s, one.last_sign_age_s) == (3.0, 23.0)
    assert (one.step, one.step_s, one.loss) == (None, None, None)


def test_output_is_a_sign_of_life(job):
    job.run()
    job.now += 5.0
    job.say(1, m.Alive(attempt=0, heartbeats=(), wrote=(3,)))
    assert [worker.last_sign_age_s for worker in snapshot(job).workers] == [5.0, 5.0, 5.0, 0.0]


def test_the_step_time_follows_a_change_of_speed_and_a_new_epoch(job):
    job.run()
    step = 0.0
    for seconds in (1.0, 4.0):
        for _ in range(30):
            job.now += seconds
            step += 1
            beat(job, 0, step=step)
        assert snapshot(job).workers[0].step_s == pytest.approx(seconds)
    beat(job, 0, step=0)
    job.now += 2.0
    beat(job, 0, step=1)
    assert snapshot(job).workers[0].step_s == pytest.approx(2.0)


def test_ranks_count_from_the_first_shown_and_the_snapshot_is_plain_data(job):
    job.run()
    outer = OuterLauncher(launcher="torchrun", rank=8, world_size=9, local_rank=0)
    shot = snapshot(job, outer=outer)
    assert [worker.rank for worker in shot.workers] == [8, 9, 10, 11]
    assert [node.first_rank for node in shot.nodes] == [8, 10]
    assert json.loads(json.dumps(plain(shot)))["workers"][3]["rank"] == 11


def test_observers_that_ask_at_almost_the_same_time_get_the_same_snapshot(job):
    job.run()
    plan, snapshots = job.composed[-1].plan, Snapshots("/runs/1", started=1000.0)
    first = snapshots.take(job.policy, plan, now=job.now)
    assert snapshots.take(job.policy, plan, now=job.now + REUSE_S / 2) is first
    beat(job, 0, step=7)
    later = snapshots.take(job.policy, plan, now=job.now + REUSE_S)
    assert later.workers[0].step == 7


def test_a_snapshot_shows_the_end_of_a_worker_at_once(job):
    job.run()
    plan, snapshots = job.composed[-1].plan, Snapshots("/runs/1", started=1000.0)
    assert snapshots.take(job.policy, plan, now=job.now).workers_up == 4
    job.exited(1)
    assert snapshots.take(job.policy, plan, now=job.now).workers_up == 3
