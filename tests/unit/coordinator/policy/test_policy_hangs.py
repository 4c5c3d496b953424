from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.policy import hang_detection
from distlaunch.coordinator.policy import job as job_policy
from distlaunch.coordinator.policy.restarts import Final, FinalReason
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions

DUMP = """Current thread 0x00007f00 (most recent call first):
  File "/home/u/train.py", line {line} in step
  File "/home/u/train.py", line 9 in <module>
"""
TIMEOUT_S = 30.0
GAP_S = (TIMEOUT_S + hang_detection.SLACK_S) / 10
"""Between two samples."""


class Watched:
    """A job with a hang timeout, all of whose workers run."""

    def __init__(self, job) -> None:
        self.job = job

    def alive(self, *beats: int, wrote=(), held=False, attempt=None, step=1) -> list:
        at = self.job.attempt if attempt is None else attempt
        heartbeats = tuple(m.Heartbeat(rank=rank, values={"step": step}) for rank in beats)
        return self.job.say(
            0, m.Alive(attempt=at, heartbeats=heartbeats, wrote=tuple(wrote), held=held)
        )

    def pass_time(self, seconds: float) -> list:
        """Move the clock forward and handle every deadline on the way."""
        actions = []
        until = self.job.now + seconds
        while (due := self.job.policy.deadline()) is not None and due <= until:
            self.job.now = max(self.job.now, due)
            actions += self.job.tick()
        self.job.now = until
        return actions

    def fall_silent(self) -> list:
        return self.pass_time(TIMEOUT_S + hang_detection.SLACK_S)

    def stacks(self, node=0, *, line=5, odd=None, attempt=None, serial=None) -> list:
        ranks = range(node * self.job.per_node, (node + 1) * self.job.per_node)
        stacks = tuple(
            m.Stack(
                rank=rank,
                pid=1000 + rank,
                state="S",
                text=DUMP.format(line=7 if rank == odd else line),
            )
            for rank in ranks
        )
        at = self.job.attempt if attempt is None else attempt
        return self.job.say(
            node,
            m.Stacks(attempt=at, serial=self.asked() if serial is None else serial, stacks=stacks),
        )

    def stand_still(self, *, odd=None) -> list:
        """Answer each request with the same stacks, until none follows."""
        actions, answered = [], None
        while (serial := self.asked()) != answered:
            answered = serial
            for node in range(self.job.nodes):
                actions += self.stacks(node, odd=odd)
            actions += self.pass_time(5.0)
        return actions

    def asked(self) -> int:
        """Return the serial of the last request."""
        return max((question.serial for _, question in self.job.sent(m.CollectStacks)), default=0)

    def hang(self) -> list:
        """Send nothing, answer with the same stacks, and let all workers end as asked."""
        self.fall_silent()
        self.stand_still(odd=1)
        for rank in self.job.ranks:
            self.job.exited(rank, -15, reported=True)
        return self.job.all_gone()


@pytest.fixture
def watched(make_job):
    def start(nodes=1, per_node=3, **settings) -> Watched:
        return Watched(
            make_job(
                nodes, per_node, hang_timeout_s=TIMEOUT_S, script_dir="/home/u", **settings
            ).run()
        )

    return start


def asked(job, actions=None) -> list[int]:
    return [node for node, _ in job.sent(m.CollectStacks, actions)]


def test_silent_workers_are_asked_where_they_stand_then_stopped_and_the_job_ends_with_124(watched):
    watch = watched()
    job = watch.job
    assert asked(job, watch.pass_time(TIMEOUT_S)) == []
    assert asked(job, watch.pass_time(hang_detection.SLACK_S)) == [0]
    assert job.sent(m.Stop) == []
    actions = watch.stand_still(odd=1)
    assert [stop.signum for _, stop in job.sent(m.Stop, actions)] == [signal.SIGTERM]
    assert "rank 1" in job.notices
    [keep] = job.of(a.WriteStacks, actions)
    assert [stack.rank for stack in keep.stacks] == [0, 1, 2]
    [event] = job.entries("hang")
    assert (event["attempt"], event["behind"], event["frame"]) == (0, [1], "train.py:7 in step")
    for rank in job.ranks:
        job.exited(rank, -15, reported=True)
    actions = job.all_gone()
    [hung] = job.of(a.ReportHang, actions)
    assert hung.final
    assert job.of(a.ReportFailure) == []
    assert job.exit_code == 124


def at_work(number: int, *, busy: bool = True) -> m.Stack:
    """Return the sample of a worker that is in another function each time, or computes."""
    function = "load" if number % 2 else "step"
    text = DUMP.format(line=5).replace("in step", f"in {function}")
    return m.Stack(
        rank=0,
        pid=1000,
        state="R",
        text=text,
        taken_s=float(number),
        cpu_s=float(number if busy else 0),
    )


def test_a_silent_job_whose_workers_go_on_is_left_alone_until_ten_times_the_timeout(watched):
    watch = watched()
    job = watch.job
    while not job.entries("hang"):
        assert job.sent(m.Stop) == []
        job.now = job.policy.deadline()
        for _, question in job.sent(m.CollectStacks, job.tick()):
            job.say(
                0, m.Stacks(attempt=0, serial=question.serial, stacks=(at_work(question.serial),))
            )
    [hang] = job.entries("hang")
    assert 10 * TIMEOUT_S <= hang["silent_s"] <= 10 * TIMEOUT_S + 2 * GAP_S
    assert (
        len(
            [line for line in job.notices.splitlines() if mentions(line, "5 min", "--hang-timeout")]
        )
        == 1
    )
    assert len(job.entries("hang_postponed")) >= 8
    assert job.entries("hang_postponed")[0]["why"] == "moved"
    for rank in job.ranks:
        job.exited(rank, -15, reported=True)
    job.all_gone()
    assert job.exit_code == 124


def test_workers_that_have_sent_heartbeats_are_not_sampled_for_signs_of_work(watched):
    watch = watched()
    watch.alive(0)
    watch.fall_silent()
    watch.job.say(0, m.Stacks(attempt=0, serial=watch.asked(), stacks=(at_work(0),)))
    assert len(watch.job.sent(m.Stop)) == 1


def test_a_sign_of_life_between_two_samples_begins_the_silence_anew(watched):
    watch = watched()
    watch.fall_silent()
    watch.stacks()
    watch.alive(wrote=[1])
    assert watch.pass_time(TIMEOUT_S) == []
    assert len(watch.job.sent(m.CollectStacks)) == 1


# --- the notice of a job without --hang-timeout

NOTICE_S = 300.0


@pytest.fixture
def unwatched(make_job):
    def start(nodes=1, per_node=3, **settings) -> Watched:
        return Watched(
            make_job(
                nodes, per_node, hang_notice_s=NOTICE_S, script_dir="/home/u", **settings
            ).run()
        )

    return start


def test_a_silent_job_is_reported_once_and_goes_on(unwatched):
    watch = unwatched()
    job = watch.job
    assert watch.pass_time(NOTICE_S - 1) == []
    watch.pass_time(1)
    watch.stand_still(odd=1)
    assert mentions(job.notices, "5 min 10 s", "rank 1", "train.py:7", "--hang-timeout")
    [event] = job.entries("silence")
    assert (event["when"], event["behind"], event["frame"]) == ("notice", [1], "train.py:7 in step")
    [keep] = job.of(a.WriteStacks)
    assert len(keep.stacks) == 3
    assert job.sent(m.Stop) == []
    for _ in range(3):
        watch.alive(wrote=[0])
        assert watch.pass_time(10 * NOTICE_S) == []
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.exit_code == 0


def test_the_notice_of_a_job_that_works_names_the_work(unwatched):
    watch = unwatched()
    watch.pass_time(NOTICE_S)
    for _ in range(2):
        serial = watch.asked()
        watch.job.say(0, m.Stacks(attempt=0, serial=serial, stacks=(at_work(serial),)))
        watch.pass_time(5.0)
    assert mentions(watch.job.notices, "rank 0", "train.py:5")
    assert watch.job.entries("silence")[0]["activity"]["why"] == "moved"


@pytest.mark.parametrize("sign", [{"beats": [1]}, {"wrote": [2]}, {"held": True}])
def test_any_output_or_report_of_a_worker_delays_the_notice(unwatched, sign):
    watch = unwatched()
    watch.alive(0, 1, 2)
    for _ in range(10):
        assert watch.pass_time(NOTICE_S - 1) == []
        watch.alive(
            *sign.get("beats", ()), wrote=sign.get("wrote", ()), held=sign.get("held", False)
        )


def test_a_worker_that_is_alone_is_not_reported(unwatched):
    assert unwatched(per_node=1).job.policy.deadline() is None


def test_with_a_hang_timeout_there_is_no_notice(make_job):
    watch = Watched(make_job(1, 3, hang_timeout_s=10 * NOTICE_S, hang_notice_s=NOTICE_S).run())
    assert watch.pass_time(10 * NOTICE_S) == []


def test_ctrl_c_on_a_silent_job_shows_the_stack_of_each_rank_before_the_workers_are_reported(
    unwatched,
):
    watch = unwatched(nodes=2, per_node=1)
    job = watch.job
    watch.pass_time(NOTICE_S)
    watch.stand_still(odd=1)
    watch.pass_time(50.0)
    actions = job.signal(signal.SIGINT)
    assert (asked(job, actions), job.sent(m.Stop, actions)) == ([0, 1], [])
    assert watch.stacks(0, odd=1) == []
    actions = watch.stacks(1, odd=1)
    [message] = job.of(a.ShowMessage, actions)
    assert mentions(message.text.splitlines()[0], "6 min 5 s")
    assert "rank 0 on node0:\n      train.py:5 in step" in message.text
    assert [stop.signum for _, stop in job.sent(m.Stop, actions)] == [signal.SIGINT] * 2
    assert [event["when"] for event in job.entries("silence")] == ["notice", "stop"]
    for rank in job.ranks:
        job.exited(rank, -2, reported=True)
    job.all_gone()
    assert job.exit_code == 130


def test_nodes_that_do_not_answer_after_ctrl_c_put_the_stop_off_for_two_seconds_only(unwatched):
    watch = unwatched()
    watch.pass_time(NOTICE_S + 20)
    watch.job.signal(signal.SIGINT)
    assert watch.job.sent(m.Stop) == []
    watch.pass_time(hang_detection.STOP_ANSWER_S)
    assert len(watch.job.sent(m.Stop)) == 1


def test_a_second_ctrl_c_does_not_wait_for_where_the_workers_stand(unwatched):
    watch = unwatched()
    watch.pass_time(NOTICE_S + 20)
    watch.job.signal(signal.SIGINT)
    watch.job.now += 1.5
    watch.job.signal(signal.SIGINT)
    watch.stacks()
    watch.pass_time(10)
    assert [stop.signum for _, stop in watch.job.sent(m.Stop)] == [signal.SIGKILL]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_only_ctrl_c_on_a_silent_job_asks_first(unwatched, signum):
    watch = unwatched()
    watch.pass_time(NOTICE_S + 20 if signum == signal.SIGTERM else NOTICE_S - 1)
    actions = watch.job.signal(signum)
    assert (asked(watch.job, actions), len(watch.job.sent(m.Stop, actions))) == ([], 1)


def test_without_a_timeout_nobody_is_watched(make_job):
    job = make_job().run()
    assert job.policy.deadline() is None


def test_heartbeats_keep_a_job_that_writes_nothing_going(watched):
    watch = watched()
    for _ in range(100):
        watch.alive(0, 1, 2)
        assert watch.pass_time(TIMEOUT_S) == []


def test_output_keeps_a_job_that_sends_no_heartbeats_going(watched):
    watch = watched()
    for _ in range(100):
        watch.alive(wrote=[1])
        assert watch.pass_time(TIMEOUT_S) == []


def test_of_a_worker_that_has_sent_heartbeats_output_is_no_sign_of_life(watched):
    watch = watched()
    watch.alive(0, 1, 2)
    watch.pass_time(TIMEOUT_S - 1)
    watch.alive(wrote=[0, 1, 2])
    assert asked(watch.job, watch.pass_time(1 + hang_detection.SLACK_S)) == [0]


def test_output_of_a_worker_without_heartbeats_counts_beside_those_of_others(watched):
    watch = watched()
    watch.alive(0)
    watch.pass_time(TIMEOUT_S - 1)
    watch.alive(wrote=[2])
    assert watch.pass_time(TIMEOUT_S - 1) == []


def test_output_that_nobody_takes_explains_a_silence(watched):
    watch = watched()
    watch.alive(0)
    watch.pass_time(TIMEOUT_S - 1)
    watch.alive(held=True)
    assert watch.pass_time(TIMEOUT_S - 1) == []


def test_signs_of_an_attempt_before_count_for_nothing(watched):
    watch = watched()
    watch.pass_time(TIMEOUT_S - 1)
    watch.alive(0, attempt=7)
    assert asked(watch.job, watch.pass_time(1 + hang_detection.SLACK_S)) == [0]


def test_time_counts_from_when_all_workers_have_started(make_job):
    job = make_job(hang_timeout_s=TIMEOUT_S)
    job.begin()
    job.prepared()
    job.started(0)
    job.now = 1000.0
    assert job.policy.deadline() is None
    job.started(1)
    assert job.policy.deadline() == pytest.approx(1000 + TIMEOUT_S + hang_detection.SLACK_S)


def test_nodes_that_do_not_answer_are_not_waited_for_long(watched):
    watch = watched(nodes=3, per_node=2)
    assert asked(watch.job, watch.fall_silent()) == [0, 1, 2]
    for _ in range(hang_detection.SAMPLES):
        assert watch.job.sent(m.Stop) == []
        watch.stacks(1, odd=2)
        watch.pass_time(hang_detection.ANSWER_S)
        watch.pass_time(GAP_S)
    assert len(watch.job.sent(m.Stop)) == 3
    assert watch.job.entries("hang")[0]["groups"]


def test_a_worker_that_fails_while_stacks_are_taken_is_the_cause(watched):
    watch = watched()
    watch.fall_silent()
    watch.job.exited(1, 1, tail=watch.job.RAISED)
    watch.pass_time(1.0)
    watch.stacks()
    for rank in (0, 2):
        watch.job.exited(rank, -15, reported=True)
    watch.job.all_gone()
    assert (watch.job.exit_code, watch.job.of(a.ReportHang), watch.job.entries("hang")) == (
        1,
        [],
        [],
    )


def test_a_sign_of_life_while_stacks_are_taken_lets_the_job_go_on_watched(watched):
    watch = watched()
    watch.fall_silent()
    assert "goes on" in watch.alive(0)[-1].text
    assert watch.stacks() == []
    assert watch.job.sent(m.Stop) == []
    assert asked(watch.job, watch.fall_silent()) == [0]
    watch.stand_still()
    assert watch.job.sent(m.Stop)


def test_stacks_that_were_not_asked_for_or_come_twice_change_nothing(watched):
    watch = watched(nodes=2, per_node=1)
    assert watch.stacks(0) == []
    watch.fall_silent()
    watch.stacks(0)
    assert watch.stacks(0) == []
    assert watch.stacks(1, attempt=5) == []
    assert watch.job.sent(m.Stop) == []


def test_a_late_answer_is_not_taken_for_that_to_the_next_question(watched):
    watch = watched()
    watch.fall_silent()
    late = watch.asked()
    watch.alive(0)
    watch.fall_silent()
    assert watch.stacks(serial=late) == []
    assert watch.job.sent(m.Stop) == []
    watch.stacks()
    assert watch.job.sent(m.Stop)


def test_the_report_explains_missed_heartbeats_and_the_remedy(watched):
    watch = watched()
    watch.alive(0, 1, 2)
    watch.pass_time(TIMEOUT_S - 1)
    watch.alive(wrote=[0, 1, 2])
    watch.pass_time(1 + hang_detection.SLACK_S)
    watch.stacks(odd=1)
    [event] = watch.job.entries("hang")
    assert event["output_came"] is True
    assert mentions(event["hint"], "evaluation")
    assert watch.job.policy._run.hang.text.startswith(
        "hang: no heartbeat from any of 3 workers for 30.3 s (output still"
    )


def test_output_soon_after_the_last_heartbeat_is_not_reported_to_have_come_all_the_while(watched):
    watch = watched()
    watch.pass_time(5)
    watch.alive(wrote=[0])
    watch.alive(0, 1, 2)
    watch.pass_time(1)
    watch.alive(wrote=[0])
    watch.fall_silent()
    watch.stacks()
    assert watch.job.entries("hang")[0]["output_came"] is False


def test_the_report_names_workers_that_had_to_be_killed_after_a_hang(watched):
    watch = watched()
    watch.fall_silent()
    watch.stand_still(odd=1)
    watch.job.exited(0, -15, reported=True)
    watch.job.exited(1, -9, reported=True)
    watch.job.exited(2, 0, reported=True)
    watch.job.all_gone()
    [hung] = watch.job.of(a.ReportHang)
    assert hung.killed == (1,)
    assert mentions(hung.after_grace, "5 s", "--failure-grace")


def test_being_asked_to_stop_while_stacks_are_taken_is_what_counts(watched):
    watch = watched()
    watch.fall_silent()
    watch.job.signal(signal.SIGTERM)
    assert watch.stacks() == []
    for rank in watch.job.ranks:
        watch.job.exited(rank, -15, reported=True)
    watch.job.all_gone()
    assert watch.job.exit_code == 143


def test_a_signal_after_the_hang_gives_the_signals_code_and_the_report_all_the_same(watched):
    watch = watched()
    watch.fall_silent()
    watch.stand_still()
    watch.job.now += 1
    watch.job.signal(signal.SIGINT)
    for rank in watch.job.ranks:
        watch.job.exited(rank, -15, reported=True)
    watch.job.all_gone()
    assert watch.job.exit_code == 130
    assert watch.job.of(a.ReportHang)[0].final


def test_a_hang_is_a_failure_that_may_be_restarted(watched):
    watch = watched(max_restarts=1, hang_action="restart")
    watch.hang()
    [hung] = watch.job.of(a.ReportHang)
    assert not hung.final
    assert watch.job.attempt == 1
    watch.job.come_up()
    for rank in watch.job.ranks:
        watch.job.exited(rank)
    watch.job.all_gone()
    assert watch.job.exit_code == 0


def test_the_same_hang_twice_without_progress_ends_the_job(watched):
    watch = watched(max_restarts=5, hang_action="restart")
    watch.hang()
    watch.job.come_up()
    watch.hang()
    assert watch.job.exit_code == 124
    assert watch.job.of(a.ReportHang)[-1].decision == Final(reason=FinalReason.NO_PROGRESS)


def test_the_same_hang_after_more_steps_is_progress(watched):
    watch = watched(max_restarts=5, hang_action="restart")
    watch.alive(0, 1, 2, step=10)
    watch.hang()
    watch.job.come_up()
    watch.alive(0, 1, 2, step=11)
    watch.hang()
    assert (watch.job.exit_code, watch.job.attempt) == (None, 2)
    watch.job.come_up()
    watch.alive(0, 1, 2, step=11)
    watch.hang()
    assert watch.job.exit_code == 124


def test_after_the_last_worker_has_ended_there_is_no_hang(watched):
    watch = watched()
    for rank in watch.job.ranks:
        watch.job.exited(rank)
    watch.job.now += job_policy.NOTICE_S
    watch.job.tick()
    assert watch.job.policy.deadline() is None


def test_the_diagnosis_gets_the_ended_ranks(watched):
    watch = watched()
    watch.job.exited(2)
    watch.fall_silent()
    watch.stand_still()
    assert watch.job.entries("hang")[0]["ended"] == [2]


def test_a_coordinator_that_was_frozen_itself_gives_signs_of_life_time_to_come_in(watched):
    watch = watched()
    watch.job.now += 1000.0
    assert watch.job.tick() == []
    watch.alive(0)
    assert watch.pass_time(TIMEOUT_S) == []


def test_a_rank_that_has_left_the_others_alone_is_mentioned_once(make_job):
    watch = Watched(make_job(per_node=4).run())
    watch.job.exited(2)
    assert watch.pass_time(hang_detection.ALONE_S - 1) == []
    watch.job.exited(3)
    [message] = watch.pass_time(1.0)
    assert message.text == "ranks 2-3 ended with 0 1 min ago; 2 workers still running"
    watch.job.exited(1)
    assert watch.pass_time(1000.0) == []


@pytest.mark.parametrize("how", ["all end", "failure", "signal"])
def test_nobody_is_mentioned_when_the_job_ends(make_job, how):
    watch = Watched(make_job(per_node=2, grace_s=500.0, failure_grace_s=500.0).run())
    watch.job.exited(0)
    if how == "signal":
        watch.job.signal(signal.SIGTERM)
    else:
        watch.job.exited(1, 0 if how == "all end" else 1)
    watch.pass_time(2.0)
    before = len(watch.job.actions)
    watch.pass_time(400.0)
    assert watch.job.actions[before:] == []


def test_steps_decide_whether_the_same_failure_twice_was_progress(make_job):
    for second, restarted in ((10, False), (11, True)):
        watch = Watched(make_job(max_restarts=5, min_uptime_s=0.0).run())
        watch.alive(0, step=10)
        watch.job.fail()
        watch.job.come_up()
        watch.alive(0, step=second)
        watch.job.fail()
        assert (watch.job.exit_code is None) is restarted


def test_a_message_of_a_huge_job_costs_what_its_own_ranks_cost(make_job):
    nodes, per_node = 16_384, 8
    watch = Watched(make_job(nodes, per_node, hang_timeout_s=TIMEOUT_S).run())
    for node in range(nodes):
        first = node * per_node
        beats = tuple(
            m.Heartbeat(rank=rank, values={"step": 1}) for rank in range(first, first + per_node)
        )
        watch.job.now += 0.00001
        watch.job.say(node, m.Alive(attempt=0, heartbeats=beats, wrote=()))
    assert len(watch.job.entries("progress")) == 1
    assert len(asked(watch.job, watch.fall_silent())) == nodes


# --- some ranks hang, and others give signs of life

REDUCE = """Current thread 0x00007f00 (most recent call first):
  File "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/u/train.py", line {line} in step
  File "/home/u/train.py", line 9 in <module>
"""


def answer(watch, waits, *, lines=(5, 7), cpu_s=None, states=None) -> list:
    """Answer the last request: ``waits`` are the ranks that wait in a collective."""
    serial = watch.asked()
    ranks = [rank for rank in watch.job.ranks if rank not in watch.job.policy._hang_detector.ended]
    stacks = tuple(
        m.Stack(
            rank=rank,
            pid=1000 + rank,
            state=(states or {}).get(rank, "S"),
            text=(REDUCE if rank in waits else DUMP).format(line=lines[rank not in waits]),
            taken_s=float(serial),
            cpu_s=(cpu_s or {}).get(rank, 0.0) * serial,
        )
        for rank in ranks
    )
    return watch.job.say(0, m.Stacks(attempt=watch.job.attempt, serial=serial, stacks=stacks))


def chatter(watch, *, waits=(0, 2), seconds=4 * TIMEOUT_S, beats=(0,), **fields) -> list:
    """Report the same step of some ranks again and again, and answer all requests."""
    actions = []
    answered = watch.asked()
    for _ in range(int(seconds)):
        actions += watch.alive(*beats)
        actions += watch.pass_time(1.0)
        if watch.asked() != answered:
            answered = watch.asked()
            actions += answer(watch, waits, **fields)
        if watch.job.sent(m.Stop):
            break
    return actions


def test_a_rank_that_holds_up_others_that_report_all_the_while_is_a_hang(watched):
    watch = watched()
    watch.alive(0, 1, 2, step=20)
    chatter(watch, beats=(0, 2))
    [event] = watch.job.entries("hang")
    assert (event["behind"], event["by_steps"]) == ([1], True)
    assert event["silent_s"] >= TIMEOUT_S
    assert watch.job.sent(m.Stop)


def test_a_rank_that_holds_up_others_that_only_write_is_a_hang(watched):
    watch = watched()
    watch.alive(0, 1)
    watch.pass_time(1.0)
    for _ in range(200):
        before = watch.asked()
        watch.alive(wrote=[2])  # rank 2 has never reported
        watch.pass_time(1.0)
        if watch.asked() != before:
            answer(watch, (0, 2))
    assert watch.job.entries("hang")[0]["behind"] == [1]


@pytest.mark.parametrize(
    "case",
    [
        {"beats": (0, 1, 2)},  # the rank itself gives signs of life
        {"waits": (0,), "beats": (0, 2)},  # another rank does not wait
        {"waits": ()},
        {"waits": (0, 1, 2)},  # nobody holds up the others
        {"cpu_s": {1: 0.9}},  # it computes
    ],
)
def test_ranks_that_lag_for_a_good_reason_are_left_alone(watched, case):
    watch = watched()
    watch.alive(0, 1, 2, step=1)
    chatter(watch, **case)
    assert watch.job.entries("hang") == []
    assert watch.job.sent(m.Stop) == []


def lose_heartbeats_of(watch, rank) -> None:
    """Report step 1 of ranks 0 and 2, of which ``rank`` stops, and the output of rank 1."""
    watch.alive(0, 2)
    for _ in range(int(3 * TIMEOUT_S)):
        before = watch.asked()
        watch.alive(2 - rank, wrote=[1])
        watch.pass_time(1.0)
        if watch.asked() != before:
            answer(watch, (0, 2))


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_rank_that_writes_and_reports_no_steps_does_not_lag(watched, stopped):
    watch = watched()
    lose_heartbeats_of(watch, stopped)
    assert asked(watch.job)  # the workers were sampled
    assert watch.job.entries("hang") == watch.job.entries("silence") == []
    assert watch.job.sent(m.Stop) == []


def test_a_rank_that_has_shown_no_sign_of_life_does_not_lag(watched):
    watch = watched()
    watch.alive(0, 2)
    chatter(watch, beats=(0,))
    assert asked(watch.job)
    assert watch.job.entries("hang") == watch.job.entries("silence") == []


def test_heartbeats_without_steps_are_signs_of_life_of_a_rank(watched):
    watch = watched()
    watch.alive(0, 2)
    for _ in range(int(3 * TIMEOUT_S)):
        before = watch.asked()
        watch.alive(0)
        watch.job.say(
            0,
            m.Alive(attempt=0, heartbeats=(m.Heartbeat(rank=1, values={"loss": 1.0}),), wrote=()),
        )
        watch.pass_time(1.0)
        if watch.asked() != before:
            answer(watch, (0, 2))
    assert asked(watch.job)
    assert watch.job.entries("hang") == []


def test_a_rank_that_only_wrote_and_holds_up_others_is_reported_and_the_job_goes_on(watched):
    watch = watched()
    watch.alive(0, 2, wrote=[1])
    chatter(watch, beats=(0,))
    [event] = watch.job.entries("silence")
    assert (event["behind"], event["by_steps"]) == ([1], True)
    assert watch.job.entries("hang") == []
    assert watch.job.sent(m.Stop) == []
    watch.fall_silent()
    watch.stand_still(odd=1)
    assert len(watch.job.entries("hang")) == 1


def test_a_rank_that_waits_for_the_disk_is_reported_and_the_job_goes_on(watched):
    watch = watched()
    watch.alive(0, 1, 2)
    chatter(watch, beats=(0, 2), states={1: "D"})
    [event] = watch.job.entries("silence")
    assert event["behind"] == [1]
    assert watch.job.entries("hang") == []
    assert watch.job.sent(m.Stop) == []


@pytest.mark.parametrize("with_timeout", [False, True])
def test_ranks_that_reported_steps_may_end_while_workers_are_sampled(
    watched, unwatched, with_timeout
):
    watch = watched() if with_timeout else unwatched()
    watch.alive(0, 1, step=20)
    watch.alive(0, step=21)
    before = watch.asked()
    while watch.asked() == before:
        watch.alive(0, step=21)
        watch.pass_time(1.0)
    for rank in (0, 1):
        watch.job.exited(rank)
    answer(watch, (2,))
    watch.pass_time(TIMEOUT_S / 2)
    assert watch.job.entries("hang") == []
    watch.job.exited(2)
    watch.job.all_gone()
    assert watch.job.exit_code == 0


def test_a_rank_that_moves_on_between_the_samples_is_left_alone(watched):
    watch = watched()
    watch.alive(0, 1, 2, step=1)
    for number in range(200):
        before = watch.asked()
        watch.alive(0)
        watch.pass_time(1.0)
        if watch.asked() != before:
            serial = watch.asked()
            stacks = tuple(
                m.Stack(rank=rank, pid=1000 + rank, state="S", text=REDUCE.format(line=5))
                for rank in (0, 2)
            )
            name = "load" if serial % 2 else "step"
            moved = m.Stack(
                rank=1,
                pid=1001,
                state="S",
                text=DUMP.format(line=5).replace("in step", f"in {name}"),
            )
            watch.job.say(0, m.Stacks(attempt=0, serial=serial, stacks=(*stacks, moved)))
        assert watch.job.entries("hang") == [], number


def test_new_steps_end_the_search_for_ranks_that_lag(watched):
    watch = watched()
    watch.alive(0, 1, 2, step=1)
    for step in range(2, 200):
        watch.alive(0, step=step)
        assert asked(watch.job, watch.pass_time(1.0)) == []


def test_one_rank_alone_that_reports_steps_does_not_lag(watched):
    watch = watched()
    for _ in range(100):
        watch.alive(0)
        watch.alive(wrote=[1])
        assert watch.pass_time(TIMEOUT_S - 1) == []


def test_without_a_timeout_a_rank_at_a_lower_step_is_noticed_once(unwatched):
    watch = unwatched()
    watch.alive(0, 1, 2, step=20)
    watch.alive(0, 2, step=21)
    for _ in range(700):
        before = watch.asked()
        watch.alive(0, step=21)
        watch.pass_time(1.0)
        if watch.asked() != before:
            answer(watch, (0, 2))
    [event] = watch.job.entries("silence")
    assert (event["behind"], event["by_steps"]) == ([1], True)
    assert watch.job.sent(m.Stop) == []


# --- a worker has ended with 0, and others wait for it


def end_one(watch, **fields) -> float:
    """End rank 1 with 0, and answer all requests for 10 s. Return when that began."""
    watch.pass_time(60.0 if watch.job.policy.settings.hang_timeout_s is None else 5.0)
    began = watch.job.now
    watch.job.exited(1)
    answered = watch.asked()
    for _ in range(40):
        watch.pass_time(0.25)
        if watch.asked() != answered:
            answered = watch.asked()
            answer(watch, fields.get("waits", (0, 2)), cpu_s=fields.get("cpu_s"))
    return began


@pytest.mark.parametrize("with_timeout", [False, True])
def test_workers_that_wait_for_one_that_has_ended_are_reported_within_10_s(
    watched, unwatched, with_timeout
):
    watch = watched() if with_timeout else unwatched()
    end_one(watch)
    [event] = watch.job.entries("silence")
    assert (event["when"], event["behind"], event["ended"]) == ("end", [1], [1])
    assert mentions(watch.job.notices, "rank 1", "exit code 0", "all_reduce")
    assert watch.job.sent(m.Stop) == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [({}, True), ({"hang_action": "restart"}, True), ({"hang_action": "report"}, False)],
)
def test_with_a_timeout_the_notice_says_when_the_attempt_ends(watched, settings, named):
    watch = watched(**settings)
    end_one(watch)
    assert watch.job.entries("silence")
    assert mentions(watch.job.notices, "sign of life", 30, "--hang-timeout") is named
    assert not mentions(watch.job.notices, "ends jobs that hang")


@pytest.mark.parametrize("case", [{"waits": (0,)}, {"waits": ()}, {"cpu_s": {0: 0.1}}])
def test_workers_that_go_on_after_one_has_ended_are_not_reported(unwatched, case):
    watch = unwatched()
    end_one(watch, **case)
    watch.pass_time(40.0)
    assert watch.job.entries("silence") == []


def test_output_after_the_end_of_a_worker_puts_the_report_off(unwatched):
    watch = unwatched()
    watch.job.exited(1)
    for _ in range(30):
        before = watch.asked()
        watch.pass_time(1.0)
        if watch.asked() != before:
            watch.alive(wrote=[0])
    assert watch.job.entries("silence") == []
    assert len(watch.job.sent(m.CollectStacks)) == 3


def test_a_worker_that_fails_after_another_has_ended_is_the_cause(unwatched):
    watch = unwatched()
    watch.job.exited(1)
    watch.pass_time(hang_detection.END_CHECK_S)
    watch.job.exited(0, 1, tail=watch.job.RAISED)
    answer(watch, (2,))
    watch.pass_time(30.0)
    assert watch.job.entries("silence") == []


# --- what a hang leads to


def test_a_hang_may_only_be_reported_once_for_a_silence(watched):
    watch = watched(hang_action="report")
    watch.fall_silent()
    watch.stand_still(odd=1)
    assert watch.job.sent(m.Stop) == []
    for said in ("rank 1 is behind", "train.py:7 in step", "--hang-action"):
        assert said in watch.job.notices
    assert [event["action"] for event in watch.job.entries("hang")] == ["report"]
    watch.pass_time(20 * TIMEOUT_S)
    assert len(watch.job.entries("hang")) == 1
    watch.alive(wrote=[0])
    watch.fall_silent()
    watch.stand_still(odd=1)
    assert len(watch.job.entries("hang")) == 2
    for rank in watch.job.ranks:
        watch.job.exited(rank)
    watch.job.all_gone()
    assert watch.job.exit_code == 0


def test_ranks_that_lag_may_only_be_reported_once_without_a_new_step(watched):
    watch = watched(hang_action="report")
    watch.alive(0, 1, 2)
    chatter(watch, seconds=10 * TIMEOUT_S, beats=(0, 2))
    assert len(watch.job.entries("hang")) == 1
    watch.alive(0, 1, 2, step=2)
    for _ in range(200):
        before = watch.asked()
        watch.alive(0, 2, step=2)
        watch.pass_time(1.0)
        if watch.asked() != before:
            answer(watch, (0, 2))
    assert len(watch.job.entries("hang")) == 2


def test_by_default_a_hang_ends_the_job_in_spite_of_restarts(watched):
    watch = watched(max_restarts=3)
    watch.hang()
    [hung] = watch.job.of(a.ReportHang)
    assert hung.decision == Final(reason=FinalReason.HUNG)
    assert watch.job.exit_code == 124
