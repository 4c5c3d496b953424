from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.attempt import CAUSE_S, SAME_S, TAILS_KEPT
from distlaunch.coordinator.policy.hang_detection import STOP_ANSWER_S
from distlaunch.coordinator.policy.restarts import (
    Final,
    FinalReason,
    Outcome,
    Restart,
    RestartRule,
    text_of,
)
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions


def stops(job, actions) -> list[tuple[int, int, float]]:
    return [(node, stop.signum, stop.grace_s) for node, stop in job.sent(m.Stop, actions)]


def final_decision(job) -> Final:
    decision = job.of(p.ReportFailure)[-1].decision
    assert isinstance(decision, Final)
    return decision


def why_final(job) -> str:
    return text_of(final_decision(job))


def test_the_first_failure_stops_all_workers_on_all_nodes(make_job):
    job = make_job(nodes=3, per_node=2, failure_grace_s=4.0).run()
    assert stops(job, job.exited(3, 1)) == [(node, signal.SIGTERM, 4.0) for node in range(3)]
    assert job.phase == "stopping"


def test_after_an_exception_the_others_get_a_moment_to_fail_in_the_same_way(make_job):
    job = make_job(per_node=3).run()
    assert stops(job, job.exited(1, 1, tail=job.RAISED)) == []
    assert job.policy.deadline() == pytest.approx(job.now + SAME_S)
    assert stops(job, job.exited(0, 1, tail=job.RAISED)) == []
    job.now += SAME_S
    assert stops(job, job.tick()) == [(0, signal.SIGTERM, job.policy.settings.failure_grace_s)]
    job.exited(2, -15, reported=True)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert failed.diagnosis.cause.ranks == (1, 0)


def test_workers_that_fail_while_all_are_stopped_bring_no_second_stop(make_job):
    job = make_job(per_node=4).run()
    job.exited(2, 1, tail=job.RAISED)
    assert stops(job, job.exited(1, 1, tail=job.RAISED)) == []
    assert stops(job, job.exited(0, -15, reported=True)) == []
    assert len(stops(job, job.exited(3, -9, reported=True))) == 1, "for what the workers have left"


@pytest.mark.parametrize(
    ("returncode", "code"), [(1, 1), (77, 77), (255, 255), (-9, 137), (-11, 139), (-6, 134)]
)
def test_a_failed_job_exits_as_the_worker_that_is_named(make_job, returncode, code):
    job = make_job(per_node=3).run()
    job.exited(1, returncode, tail=job.RAISED if returncode > 0 else b"")
    job.exited(0, -15, reported=True)
    job.exited(2, 0, reported=True)
    job.all_gone()
    assert job.exit_code == code
    [failed] = job.of(p.ReportFailure)
    assert failed.diagnosis.cause.ranks == (1,)
    assert (failed.attempt, failed.decision) == (0, Final(reason=FinalReason.NOT_WANTED))


def test_the_report_reads_the_stderr_of_the_right_worker(make_job):
    job = make_job(nodes=2, per_node=2).run()
    job.now = 3.0
    job.exited(3, 1, tail=job.RAISED, uptime_s=2.5)
    for rank in range(3):
        job.exited(rank, -15, reported=True)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    cause = failed.diagnosis.cause
    assert (cause.host, cause.exception_type, cause.message) == ("node1", "ValueError", "the cause")


def test_the_failure_comes_before_the_end_of_the_job(make_job):
    job = make_job().run()
    kinds = [type(action) for action in job.fail()]
    assert kinds.index(p.ReportFailure) < kinds.index(p.EndJob)


# --- a consequence first

TIMED_OUT = (
    b"Traceback (most recent call last):\n"
    b'  File "/p/train.py", line 2, in <module>\n'
    b"RuntimeError: [gloo] Timed out waiting 2000ms for recv operation to complete\n"
)


def test_a_consequence_waits_for_its_cause_which_then_stops_all(make_job):
    job = make_job(per_node=3).run()
    job.now = 10.0
    assert stops(job, job.exited(1, 1, tail=job.LOST)) == []
    assert job.phase == "running"
    assert job.policy.deadline() == pytest.approx(10.0 + CAUSE_S)
    job.now += CAUSE_S / 2
    assert len(stops(job, job.exited(0, 3, tail=job.RAISED))) == 1
    assert job.policy.deadline() is None
    job.exited(2, -15, reported=True)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert (failed.diagnosis.cause.ranks, job.exit_code) == ((0,), 3)


def test_a_second_consequence_neither_stops_nor_prolongs_the_wait(make_job):
    job = make_job(per_node=3).run()
    job.exited(1, 1, tail=job.LOST)
    deadline = job.policy.deadline()
    job.now += CAUSE_S / 2
    assert stops(job, job.exited(2, 1, tail=job.LOST)) == []
    assert job.policy.deadline() == deadline


def test_all_are_stopped_when_no_cause_shows_in_time(make_job):
    job = make_job(per_node=2, failure_grace_s=6.0).run()
    job.exited(1, 1, tail=job.LOST)
    assert job.tick() == [], "a tick that comes early does nothing"
    job.now += CAUSE_S
    assert stops(job, job.tick()) == [], "the stacks of the others are still awaited"
    assert job.policy.deadline() < job.now + CAUSE_S
    job.now += STOP_ANSWER_S
    assert stops(job, job.tick()) == [(0, signal.SIGTERM, 6.0)]
    assert job.tick() == []
    job.exited(0, -15, reported=True)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert not failed.diagnosis.cause_seen
    assert job.exit_code == 1


def test_a_late_stack_counts_although_another_rank_has_failed_meanwhile(make_job):
    job = make_job(per_node=3).run()
    asked = job.sent(m.CollectStacks, job.exited(1, 1, tail=TIMED_OUT))
    job.exited(2, 1, tail=TIMED_OUT)
    job.now += CAUSE_S
    assert stops(job, job.tick()) == []
    text = 'Current thread 0x01 (most recent call first):\n  File "/p/data.py", line 3 in load\n'
    stack = m.Stack(rank=0, pid=1000, state="S", text=text)
    job.say(0, m.Stacks(attempt=0, serial=asked[0][1].serial, stacks=(stack,)))
    job.now = job.policy.deadline()
    assert len(stops(job, job.tick())) == 1
    job.exited(0, -15, reported=True)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert (failed.diagnosis.cause.ranks, failed.diagnosis.cause.frame) == (
        (0,),
        "data.py:3 in load",
    )


def test_stacks_are_taken_before_the_stop_and_name_the_rank_that_did_not_come(make_job):
    job = make_job(per_node=2).run()
    asked = job.sent(m.CollectStacks, job.exited(1, 1, tail=TIMED_OUT))
    assert [question.attempt for _, question in asked] == [0]
    text = 'Current thread 0x01 (most recent call first):\n  File "/p/data.py", line 3 in load\n'
    stack = m.Stack(rank=0, pid=1000, state="S", text=text)
    job.say(0, m.Stacks(attempt=0, serial=asked[0][1].serial, stacks=(stack,)))
    job.now += CAUSE_S
    actions = job.tick()
    assert [kept.stacks for kept in job.of(p.WriteStacks, actions)] == [(stack,)]
    assert len(stops(job, actions)) == 1
    job.exited(0, -15, reported=True)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert failed.diagnosis.cause.ranks == (0,)
    assert failed.diagnosis.cause.frame == "data.py:3 in load"
    assert job.exit_code == 1


def test_a_failure_with_a_cause_of_its_own_asks_for_no_stacks(make_job):
    job = make_job(per_node=2).run()
    assert job.sent(m.CollectStacks, job.exited(1, 1, tail=job.RAISED)) == []


def test_the_stop_comes_within_a_second_of_the_first_failure():
    assert CAUSE_S < 1.0


def test_a_cause_that_shows_after_the_stop_is_still_the_one_that_is_named(make_job):
    job = make_job(per_node=2).run()
    job.exited(1, 1, tail=job.LOST)
    job.now += CAUSE_S
    job.tick()
    job.now += 0.5
    job.exited(0, 9, tail=job.RAISED, reported=True)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert (failed.diagnosis.cause.ranks, job.exit_code) == ((0,), 9)


def test_if_all_have_ended_nothing_is_waited_for(make_job):
    job = make_job(per_node=2).run()
    job.exited(0, 0)
    job.exited(1, 1, tail=job.LOST)
    assert job.policy.deadline() is None
    job.all_gone()
    assert job.exit_code == 1


def test_all_ending_within_the_wait_ends_what_they_have_left(make_job):
    job = make_job(per_node=2, max_restarts=1).run()
    job.exited(0, 1, tail=job.LOST)
    assert stops(job, job.exited(1, 0)) == [(0, signal.SIGTERM, 5.0)]
    job.all_gone()
    assert (job.attempt, job.policy.deadline()) == (1, None), (
        "the old wait does not reach into the next attempt"
    )


def test_a_cause_after_many_consequences_is_named(make_job):
    ranks = TAILS_KEPT + 50
    job = make_job(per_node=ranks).run()
    for rank in range(1, ranks):
        assert stops(job, job.exited(rank, 1, tail=job.LOST)) == [], f"stopped at failure {rank}"
    job.now += CAUSE_S / 2
    job.exited(0, 3, tail=job.RAISED)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert failed.diagnosis.cause.ranks == (0,)
    assert failed.diagnosis.cause.exception_type == "ValueError"
    assert job.exit_code == 3


# --- restarts


def test_without_restarts_the_first_failure_is_the_end(make_job):
    job = make_job().run()
    job.fail()
    assert job.exit_code == 1
    assert job.of(p.StartAttempt) == [p.StartAttempt(attempt=0, port=5000)]


def test_a_restart_prepares_all_nodes_again_with_a_fresh_port(make_job):
    job = make_job(nodes=2, max_restarts=2).run()
    actions = job.fail()
    [failed] = job.of(p.ReportFailure, actions)
    assert (failed.decision, job.exit_code) == (Restart(), None)
    assert job.sent(m.Prepare, actions) == [
        (0, m.Prepare(attempt=1, port=0)),
        (1, m.Prepare(attempt=1, port=None)),
    ]
    assert job.entries("restarting") == [{"attempt": 1, "of": 2}]
    assert (job.policy.up, job.policy.ended) == (0, 0)
    job.prepared(0, port=6001)
    assert job.of(p.StartAttempt, job.prepared(1)) == [p.StartAttempt(attempt=1, port=6001)]


def test_a_restart_waits_until_every_node_is_gone(make_job):
    job = make_job(nodes=2, per_node=1, max_restarts=1).run()
    job.exited(0, 1)
    job.exited(1, -15, reported=True)
    job.gone(0)
    assert job.phase == "stopping"
    job.gone(1)
    assert job.phase == "preparing"


def test_after_a_restart_that_succeeds_the_job_has_succeeded(make_job):
    job = make_job(max_restarts=1).run()
    job.fail()
    job.come_up()
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.exit_code == 0


def test_restarts_are_used_up(make_job):
    job = make_job(max_restarts=2, min_uptime_s=1.0).run()
    for _ in range(3):
        job.fail(uptime_s=5.0)
        if job.exit_code is None:
            job.come_up()
    assert [start.attempt for start in job.of(p.StartAttempt)] == [0, 1, 2]
    decision = final_decision(job)
    assert (decision.reason, decision.allowed, decision.window_s) == (FinalReason.USED_UP, 2, None)
    assert job.exit_code == 1


def test_only_restarts_within_the_window_count(make_job):
    job = make_job(max_restarts=1, restart_window_s=100.0, min_uptime_s=1.0).run()
    job.fail(uptime_s=60.0)
    job.come_up()
    job.now = 101.0
    job.fail(uptime_s=60.0)
    assert job.phase == "preparing", "the first restart lies more than the window back"
    job.come_up()
    job.now = 150.0
    job.fail(uptime_s=60.0)
    assert job.exit_code == 1
    decision = final_decision(job)
    assert (decision.reason, decision.allowed, decision.window_s) == (FinalReason.USED_UP, 1, 100.0)


def test_a_failure_that_would_repeat_is_not_retried(make_job):
    job = make_job(max_restarts=3).run()
    job.fail(tail=job.IMPORT, uptime_s=0.3)
    assert job.exit_code == 1
    assert why_final(job).endswith("import error would repeat")


def test_an_import_error_after_the_minimum_uptime_is_retried(make_job):
    job = make_job(max_restarts=3, min_uptime_s=10.0).run()
    job.fail(tail=job.IMPORT, uptime_s=11.0)
    assert job.phase == "preparing"


def test_the_same_failure_twice_without_progress_ends_the_job(make_job):
    job = make_job(max_restarts=9).run()
    job.fail(uptime_s=2.0)
    assert job.phase == "preparing"
    job.come_up()
    job.fail(uptime_s=2.0)
    assert job.exit_code == 1
    why = why_final(job)
    assert final_decision(job).reason is FinalReason.NO_PROGRESS
    assert mentions(why, "hint: without heartbeats")
    assert mentions(why, "--min-uptime 0")


def test_the_same_failure_after_progress_is_retried(make_job):
    job = make_job(max_restarts=9, min_uptime_s=10.0).run()
    for _ in range(4):
        job.fail(uptime_s=12.0)
        job.come_up()
    assert job.attempt == 4


OTHER = b'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    g()\nKeyError: 1\n'


def failed_thrice(job, *, uptime_s=12.0, last=None, steps=()) -> str:
    """Make a job with two restarts fail three times. Return the restarts of its report."""
    job.run()
    for attempt in range(3):
        if steps:
            beat = m.Heartbeat(rank=0, values={"step": steps[attempt]})
            job.say(0, m.Alive(attempt=attempt, heartbeats=(beat,), wrote=()))
        job.fail(uptime_s=uptime_s, tail=last if last and attempt == 2 else job.RAISED)
        if attempt < 2:
            job.come_up()
    return why_final(job)


def test_why_the_same_failure_was_retried_is_reported_where_only_uptime_decided(make_job):
    why = failed_thrice(make_job(max_restarts=2))
    first, _, hint = why.partition("\n  hint: ")
    assert mentions(first, "2 restarts")
    assert mentions(hint, "without heartbeats", "help progress")
    assert mentions(hint, "12.0 s")
    assert mentions(hint, "--min-uptime")


def test_why_another_attempt_was_made_is_not_reported_where_that_needs_no_words(make_job):
    assert "hint" not in failed_thrice(make_job(max_restarts=2, min_uptime_s=0.0)), (
        "the user wants it so"
    )
    assert "hint" not in failed_thrice(make_job(max_restarts=2), last=OTHER), (
        "another failure than before"
    )
    assert "hint" not in failed_thrice(make_job(max_restarts=2), steps=(1, 2, 3)), (
        "steps told of progress"
    )
    once = make_job(max_restarts=1).run()
    once.fail(uptime_s=12.0)
    once.come_up()
    once.fail(uptime_s=12.0)
    assert "hint" not in why_final(once), "a first failure is always retried"


def test_another_failure_in_between_is_not_the_same_twice(make_job):
    job = make_job(max_restarts=9).run()
    for tail in (job.RAISED, OTHER, job.RAISED, OTHER):
        job.fail(tail=tail, uptime_s=2.0)
        job.come_up()
    assert job.attempt == 4


def outcome(signature=("ValueError", "t.py:1"), repeats=None, *, progressed=False) -> Outcome:
    return Outcome(signature=signature, repeats=repeats, progressed=progressed)


def rule(allowed: int, *before: Outcome) -> RestartRule:
    """Return a rule that has counted a restart after each of these outcomes."""
    made = RestartRule(allowed=allowed)
    for each in before:
        made.on_restart(each, 0.0)
    return made


@pytest.mark.parametrize(
    ("now", "before", "allowed", "decision"),
    [
        (outcome(), [], 0, Final(reason=FinalReason.NOT_WANTED)),
        (outcome(), [], 1, Restart()),
        (outcome(), [outcome()], 1, Final(reason=FinalReason.USED_UP, allowed=1)),
        (
            outcome(repeats="syntax error"),
            [],
            3,
            Final(reason=FinalReason.WOULD_REPEAT, repeats="syntax error"),
        ),
        (outcome(repeats="usage error", progressed=True), [], 3, Restart()),
        (outcome(), [outcome()], 3, Final(reason=FinalReason.NO_PROGRESS)),
        (outcome(progressed=True), [outcome()], 3, Restart()),
        (outcome(), [outcome(("KeyError", "t.py:1"))], 3, Restart()),
        (outcome(None), [outcome(None)], 3, Restart()),
    ],
)
def test_when_another_attempt_is_worth_it(now, before, allowed, decision):
    assert rule(allowed, *before).after_failure(now, 0.0) == decision


@pytest.mark.parametrize(
    ("allowed", "reason"),
    [(0, FinalReason.NOT_WANTED), (1, FinalReason.NO_NODE), (2, FinalReason.NO_NODE)],
)
def test_no_attempt_is_worth_it_where_no_node_can_be_reached(allowed, reason):
    decision = rule(allowed).after_failure(outcome(), 0.0, cut_off=True, processes_left=True)
    assert decision == Final(reason=reason)


@pytest.mark.parametrize(
    ("restarts", "has_begun", "flexible", "again"),
    [
        (0, True, False, True),
        (1, True, False, False),
        (1, False, False, True),
        (1, True, True, True),
    ],
)
def test_a_lost_coordinator_is_called_again_as_long_as_there_are_restarts(
    restarts, has_begun, flexible, again
):
    decision = rule(1, *[outcome()] * restarts).after_coordinator_loss(
        has_begun=has_begun, flexible=flexible
    )
    assert decision == (Restart() if again else Final(reason=FinalReason.COORDINATOR_LOST))


def test_taking_over_from_a_lost_coordinator_is_one_more_restart():
    took_over = rule(2)
    took_over.on_takeover(1, 0.0)
    assert took_over.count == 2
    assert took_over.after_failure(outcome(), 0.0) == Final(reason=FinalReason.USED_UP, allowed=2)


@pytest.mark.parametrize("reason", FinalReason)
def test_each_reason_has_a_text_of_its_own(reason):
    texts = {text_of(Final(reason=each, allowed=2, repeats="usage error")) for each in FinalReason}
    assert len(texts) == len(FinalReason)
    assert bool(text_of(Final(reason=reason))) == (reason is not FinalReason.NOT_WANTED)


# --- the delay before a restart

DELAY = {"max_restarts": 9, "restart_delay_s": (8.0, 20.0)}


def waits(job) -> float:
    """Check that the job waits for its restart. Return for how long."""
    assert job.phase == "waiting"
    due = job.policy.deadline()
    assert due is not None
    return due - job.now


def test_a_restart_waits_for_its_delay_and_then_begins(make_job):
    job = make_job(**DELAY).run()
    actions = job.fail()
    assert waits(job) == 8.0
    assert not job.sent(m.Prepare, actions)
    assert [say.text for say in job.of(p.ShowMessage, actions)] == ["restarting in 8 s ..."]
    assert job.entries("restarting") == [{"attempt": 1, "of": 9, "delay_s": 8.0}]
    job.now += 7.9
    assert job.tick() == [], "a tick that comes early does nothing"
    job.now += 0.1
    assert job.sent(m.Prepare, job.tick()) == [(0, m.Prepare(attempt=1, port=0))]
    assert (job.phase, job.policy.deadline()) == ("preparing", None)


def test_the_delay_doubles_with_each_restart_in_a_row_up_to_its_bound(make_job):
    job = make_job(min_uptime_s=0.0, **DELAY).run()
    found = []
    for _ in range(4):
        job.fail()
        found.append(waits(job))
        job.now += found[-1]
        job.tick()
        job.come_up()
    assert found == [8.0, 16.0, 20.0, 20.0]


def test_an_attempt_that_made_progress_ends_the_row(make_job):
    job = make_job(min_uptime_s=10.0, **DELAY).run()
    found = []
    for uptime_s, tail in ((1.0, job.RAISED), (1.0, OTHER), (11.0, job.RAISED), (1.0, OTHER)):
        job.fail(uptime_s=uptime_s, tail=tail)
        found.append(waits(job))
        job.now += found[-1]
        job.tick()
        job.come_up()
    assert found == [8.0, 16.0, 8.0, 16.0]


def test_a_delay_without_a_bound_stays_the_same_however_many_restarts_there_are():
    made = RestartRule(allowed=5000, delay_s=(3.0, 3.0))
    for _ in range(2000):
        made.on_restart(outcome(None), 0.0)
    assert made.after_failure(outcome(None), 0.0) == Restart(delay_s=3.0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_delay_ends_the_job_at_once(make_job, signum):
    job = make_job(**DELAY).run()
    job.fail()
    job.now += 3.0
    actions = job.signal(signum)
    assert job.exit_code == 128 + signum
    assert not job.sent(m.Stop, actions)
    assert job.policy.deadline() is None


def test_a_warning_signal_during_the_delay_reaches_nobody_and_prevents_nothing(make_job):
    job = make_job(**DELAY).run()
    job.fail()
    assert not job.sent(m.ForwardSignal, job.signal(signal.SIGUSR1))
    job.now += 8.0
    assert job.sent(m.Prepare, job.tick())


def test_a_fault_during_the_delay_ends_the_job_at_once(make_job):
    job = make_job(**DELAY).run()
    job.fail()
    job.fault()
    assert job.exit_code == 70


def test_late_messages_of_agents_do_not_change_the_delay(make_job):
    job = make_job(**DELAY).run()
    job.fail()
    before = len(job.actions)
    job.exited(1, 1, attempt=0)
    job.gone(attempt=0)
    job.say(0, m.Alive(attempt=0, heartbeats=(), wrote=()))
    assert (len(job.actions), waits(job)) == (before, 8.0)


def test_several_nodes_gather_after_the_delay(make_nodes):
    job = make_nodes(2, **DELAY).run()
    job.fail()
    assert waits(job) == 8.0
    job.pass_time(8.0)
    assert job.phase == "connecting"
    job.survey_all()
    job.come_up()
    assert (job.phase, job.attempt) == ("running", 1)


def test_a_node_that_is_lost_during_the_delay_is_waited_for_afterwards(make_nodes):
    job = make_nodes(2, **DELAY).run()
    job.fail()
    job.lost(1)
    assert (waits(job), job.exit_code) == (8.0, None)
    job.pass_time(8.0)
    job.joined(1)
    job.survey_all()
    job.come_up()
    assert (job.phase, job.attempt) == ("running", 1)


def test_where_no_node_can_be_reached_any_more_the_delay_ends(make_nodes):
    job = make_nodes(2, **DELAY).run()
    job.fail()
    job.step(p.Lost(node=0, why="Ray's driver has ended", final=True))
    assert job.exit_code == 69
