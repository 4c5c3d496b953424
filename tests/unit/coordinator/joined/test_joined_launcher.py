from __future__ import annotations

import signal
import threading

import pytest

from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from tests.facts import mentions
from tests.unit.coordinator.joined.joined_launcher import (
    CLOSED,
    VERDICT,
    commence,
    prepare,
    reach,
    stop,
)
from tests.unit.coordinator.remote_agents import GONE, exited


def test_a_joined_launcher_does_its_part_of_an_attempt_and_leaves_with_the_verdict(joined_launcher):
    launcher = joined_launcher(
        m.Ping(serial=4),
        p.SurveyNode(serial=1),
        prepare(),
        reach(),
        commence(),
        lambda: launcher.own.say(m.Started(attempt=0, pids={2: 10, 3: 11})),
        m.ForwardSignal(signum=signal.SIGUSR1),
        m.CollectStacks(attempt=0, serial=1),
        m.ReadUsage(attempt=0, serial=1),
        lambda: launcher.own.say(exited(1.0, rank=2)),
        lambda: launcher.own.say(GONE),
        p.Notice(text="a warning", level="warning"),
        p.ExitLauncher(exit_code=7, text="rank 2 failed\nat last", is_error=True),
    )
    assert launcher.run() == 7
    assert [type(each) for each in launcher.own.handled] == [
        m.Survey,
        m.Prepare,
        m.Reach,
        m.Start,
        m.ForwardSignal,
        m.CollectStacks,
        m.ReadUsage,
    ]
    kinds = [type(each) for each in launcher.link.sent]
    assert kinds == [p.LauncherInfo, m.Pong, m.Started, WorkerExit, m.AttemptEnded]
    assert (launcher.sent(p.LauncherInfo)[0].attempt, launcher.sent(p.LauncherInfo)[0].slots) == (
        -1,
        2,
    )
    assert (launcher.files.attempts, launcher.first_rank) == ([(0, [2, 3])], 2)
    assert [kind for kind, _ in launcher.records.events] == [
        "attempt_started",
        "worker_exited",
        "job_ended",
    ]
    assert ("warning", "a warning") in launcher.records.lines
    assert ("error", "rank 2 failed\nat last") in launcher.records.lines
    assert launcher.own.closed
    assert launcher.link.closed


def test_a_joined_launcher_starts_its_own_command_line(joined_launcher):
    launcher = joined_launcher(commence(), VERDICT)
    launcher.run()
    [start] = launcher.handled(m.Start)
    assert start.argv[1:] == ("-m", "timeit")
    assert [spec.rank for spec in start.workers] == [2, 3]
    assert (start.env["WORLD_SIZE"], start.env["MASTER_PORT"]) == ("6", "5555")


@pytest.mark.parametrize(
    ("given", "code"), [(0, 0), (143, 143), (255, 255), (256, 69), (-5, 69), (1 << 40, 69)]
)
def test_a_verdict_is_an_exit_code_for_any_reason(joined_launcher, given, code):
    launcher = joined_launcher(p.ExitLauncher(exit_code=given, text=""))
    assert launcher.run() == code
    assert launcher.records.of("job_ended") == [{"exit_code": code}]
    assert mentions(launcher.records.text, "node 0", given) == (given != code)


def test_the_job_has_not_ended_well_while_workers_run_here(joined_launcher):
    launcher = joined_launcher(commence(), p.ExitLauncher(exit_code=0, text="all is well"))
    assert launcher.run() == 69
    assert [stop.attempt for stop in launcher.handled(m.Stop)] == [0]
    assert mentions(launcher.records.text, "node 0", "with 0")
    assert "all is well" not in launcher.records.text


def test_nothing_counts_after_the_verdict(joined_launcher):
    launcher = joined_launcher(p.ExitLauncher(exit_code=0, text=""), commence())
    assert launcher.run() == 0
    assert not launcher.own.handled


def test_a_fault_of_the_own_node_ends_the_launcher(joined_launcher):
    launcher = joined_launcher(
        commence(), lambda: launcher.own.say(m.AgentFailed(text="the spawner has vanished"))
    )
    assert launcher.run() == 70
    assert launcher.sent(m.AgentFailed)
    assert "internal error: the spawner has vanished" in launcher.records.text


# --- attempts


def test_a_second_attempt_is_filed_and_reported_as_such(joined_launcher):
    launcher = joined_launcher(
        commence(), lambda: launcher.own.say(GONE), commence(1, restarts=1), VERDICT
    )
    assert launcher.run() == 7
    assert launcher.files.attempts == [(0, [2, 3]), (1, [2, 3])]
    assert [start.attempt for start in launcher.handled(m.Start)] == [0, 1]


def test_a_coordinator_that_starts_an_attempt_while_one_runs_is_refused(joined_launcher):
    launcher = joined_launcher(commence(), commence(1), VERDICT, max_restarts=3)
    assert launcher.run() == 69
    assert [start.attempt for start in launcher.handled(m.Start)] == [0]
    assert [each.attempt for each in launcher.handled(m.Stop)] == [0]
    assert mentions(launcher.records.text, "node 0", "h:5", "attempt 1", "0")
    assert [each["kind"] for each in launcher.records.of("coordinator_lost")] == ["odd"]
    assert mentions(launcher.sent(m.AgentEnding)[0].why, "protocol", "attempt 1")


@pytest.mark.parametrize("attempt", [0, 1])
def test_an_attempt_that_a_launcher_has_had_is_not_begun_again(joined_launcher, attempt):
    again = [VERDICT]
    launcher = joined_launcher(
        commence(1, restarts=1),
        lambda: launcher.own.say(m.AttemptEnded(attempt=1, left=())),
        commence(attempt),
        VERDICT,
        again=[again],
        max_restarts=2,
    )
    assert launcher.run() == 7
    assert [start.attempt for start in launcher.handled(m.Start)] == [1]
    (lost,) = launcher.records.of("coordinator_lost")
    assert lost["kind"] == "gone"
    assert mentions(lost["why"], f"attempt {attempt}")
    assert (
        launcher.sent(p.LauncherInfo, 1)[0].attempt,
        launcher.sent(p.LauncherInfo, 1)[0].restarts,
    ) == (
        1,
        1,
    )


def test_a_start_that_cannot_be_planned_is_reported_to_the_coordinator(
    joined_launcher, tmp_path, monkeypatch
):
    launcher = joined_launcher(commence(), VERDICT)

    def refuse(reported, interfaces):
        raise ConfigError("no such thing here")

    monkeypatch.setattr(launcher.runner._planner, "plan_start", refuse)
    assert launcher.run() == 2
    assert [ending.why for ending in launcher.sent(m.AgentEnding)] == ["no such thing here"]


# --- words that make no sense


MAKES_NO_SENSE = {
    "an attempt of many digits": commence(1 << 62),
    "an attempt below none": commence(-1),
    "restarts of many digits": commence(restarts=1 << 62),
    "more restarts than attempts": commence(restarts=1),
    "restarts below none": commence(1, restarts=-1),
    "a node rank beyond": commence(node_rank=3),
    "a node rank below": commence(node_rank=-1),
    "too few nodes": commence(hosts=("n0", "n1"), slots=(2, 2)),
    "more slots than nodes": commence(slots=(2, 2, 2, 2)),
    "other slots than ours": commence(slots=(2, 3, 2)),
    "a world of many digits": commence(slots=(1 << 62, 2, 2)),
    "local ranks of another": commence(local_ranks=(0, 2)),
    "a local rank of many digits": commence(local_ranks=(0, 1 << 62)),
    "no local ranks": commence(local_ranks=()),
    "a port beyond": commence(master_port=65536),
    "a port below": commence(master_port=-1),
    "an address that is none": commence(master_addr="a\0b"),
    "no address": commence(master_addr=""),
    "a port to hold": prepare(port=80),
    "a port to hold beyond": prepare(port=1 << 40),
    "more ports to hold than there are": prepare(ports=1 << 40),
    "fewer ports to hold than none": prepare(ports=-1),
    "an attempt to prepare of many digits": prepare(1 << 62),
    "an attempt to prepare beyond": prepare(p.MOST_ATTEMPTS + 1),
    "an attempt to prepare below": prepare(-1),
    "a way to a port beyond": reach(port=65536),
    "a way to no port": reach(port=0),
    "a way for another attempt": reach(1),
    "a way that nobody waits for": reach(bound_s=1e300),
    "a way in no time": reach(bound_s=-1.0),
    "a word that is none": reach(token="\ud800"),
    "an address to reach that is none": reach(addresses=("10.0.0.1", "\ud800")),
    "a signal that is none": stop(signum=1 << 40),
    "a signal that stops nobody": stop(signum=signal.SIGSTOP),
    "a grace below": stop(grace_s=-1.0),
    "a grace without an end": stop(grace_s=1e300),
    "a signal to pass on that kills": m.ForwardSignal(signum=signal.SIGKILL),
    "a silence that is none": m.Ping(serial=1, silence_s=0.0),
    "a silence below": m.Ping(serial=1, silence_s=-5.0),
    "a silence between two pings": m.Ping(serial=1, silence_s=1e-9),
    "a silence without an end": m.Ping(serial=1, silence_s=1e300),
    "a welcome to whom it has let in": p.Welcome(job_id="x", rank=1),
    "a refusal of whom it has let in": p.Rejected(text="", hint=None, exit_code=2, again=False),
}


@pytest.mark.parametrize("message", MAKES_NO_SENSE.values(), ids=MAKES_NO_SENSE)
def test_numbers_that_make_no_sense_end_the_launcher_and_are_reported(joined_launcher, message):
    first = [prepare()] if isinstance(message, m.Reach) else []
    launcher = joined_launcher(*first, message, commence(), VERDICT, max_restarts=3, flexible=True)
    assert launcher.run() == 69
    assert launcher.own.handled == first
    assert mentions(launcher.records.text, "node 0", "h:5")
    assert [each["kind"] for each in launcher.records.of("coordinator_lost")] == ["odd"]
    assert launcher.records.lines[-1][0] == "error"
    assert len(launcher.sent(m.AgentEnding)) == 1


def test_an_attempt_is_prepared_once_and_its_way_is_its_own(joined_launcher):
    again = joined_launcher(prepare(3), prepare(3), VERDICT)
    assert again.run() == 69
    older = joined_launcher(prepare(3), reach(2), VERDICT)
    assert older.run() == 69
    newer = joined_launcher(prepare(3), reach(3), prepare(4), reach(4), commence(4), VERDICT)
    assert newer.run() == 7


def test_bytes_that_are_no_message_end_the_launcher(joined_launcher):
    launcher = joined_launcher(b"GET / HTTP/1.1\r\n\r\n", VERDICT)
    assert launcher.run() == 69
    assert [each["kind"] for each in launcher.records.of("coordinator_lost")] == ["odd"]


@pytest.mark.parametrize("lost_after_s", [60.0, 3.6e6, 1e9])
def test_no_time_is_too_long_to_wait_for(joined_launcher, lost_after_s):
    launcher = joined_launcher(
        m.Ping(serial=1, silence_s=lost_after_s),
        commence(),
        stop(grace_s=1e9),
        VERDICT,
        lost_after_s=lost_after_s,
    )
    launcher.own.due_s = 1e9
    assert launcher.run() == 7


# --- the coordinator is lost


def test_a_coordinator_that_leaves_ends_the_job_where_no_restart_is_left(joined_launcher):
    launcher = joined_launcher(commence(), CLOSED)
    assert launcher.run() == 69
    assert [(each.signum, each.grace_s) for each in launcher.handled(m.Stop)] == [
        (signal.SIGTERM, 5.0)
    ]
    assert [each["kind"] for each in launcher.records.of("coordinator_lost")] == ["gone"]
    assert [level for level, _ in launcher.records.lines] == ["warning", "error"]
    assert [kind for kind, _ in launcher.records.events] == [
        "attempt_started",
        "coordinator_lost",
        "job_ended",
    ]


def test_a_coordinator_that_comes_back_learns_how_far_the_job_was(joined_launcher):
    launcher = joined_launcher(
        commence(2, restarts=1),
        CLOSED,
        max_restarts=2,
        again=[[prepare(3), commence(3, restarts=2), VERDICT]],
    )
    assert launcher.run() == 7
    assert [(each.attempt, each.restarts) for each in launcher.sent(p.LauncherInfo, 1)] == [(2, 1)]
    assert [start.attempt for start in launcher.handled(m.Start)] == [2, 3]


def test_an_answer_to_an_earlier_coordinator_is_not_sent_to_the_next_one(joined_launcher):
    def listed(serial: int):
        return lambda: launcher.own.say(m.LogList(serial=serial, files=(), index_bytes=0))

    def asks(serial: int) -> m.ListLogs:
        return m.ListLogs(serial=serial, attempt=0, ranks=(2,))

    launcher = joined_launcher(
        *(commence(), asks(1), listed(1), asks(2), lambda: None, CLOSED),
        max_restarts=1,
        again=[[commence(1), listed(2), asks(3), listed(3), lambda: None, VERDICT]],
    )
    assert launcher.run() == 7
    assert [each.serial for each in launcher.sent(m.LogList)] == [1]
    assert [each.serial for each in launcher.sent(m.LogList, 1)] == [3]


def test_the_name_of_a_job_that_goes_on_under_another_is_its_new_workers_and_noted(joined_launcher):
    launcher = joined_launcher(
        commence(), CLOSED, max_restarts=1, again=[[commence(1), VERDICT]], names=["j-2"]
    )
    assert launcher.run() == 7
    before, after = launcher.handled(m.Start)
    names = ("DISTLAUNCH_JOB_ID", "TORCHELASTIC_RUN_ID")
    assert [before.env[name] for name in names] == ["j", "j"]
    assert [after.env[name] for name in names] == ["j-2", "j-2"]
    assert before.env["DISTLAUNCH_RUN_DIR"] == after.env["DISTLAUNCH_RUN_DIR"]
    assert launcher.records.of("rejoined") == [{"job_id": "j-2"}]
    assert mentions(launcher.records.text, "j-2")


def test_a_coordinator_that_does_not_come_back_is_an_error_of_whoever_calls(
    joined_launcher, monkeypatch
):
    launcher = joined_launcher(CLOSED)

    def call():
        raise NodesError("node 0 has not answered")

    monkeypatch.setattr(launcher.runner, "_connect", call)
    with pytest.raises(NodesError):
        launcher.run()
    assert launcher.own.closed


def test_a_silent_coordinator_is_lost(joined_launcher):
    launcher = joined_launcher(commence(), lost_after_s=0.05)
    assert launcher.run() == 69
    assert [each["kind"] for each in launcher.records.of("coordinator_lost")] == ["silent"]


def test_a_coordinator_announces_how_long_it_may_be_silent(joined_launcher):
    launcher = joined_launcher(
        m.Ping(serial=1, silence_s=2.0), lambda: None, lost_after_s=60.0, again=[[VERDICT]]
    )
    assert launcher.run() == 7
    (lost,) = launcher.records.of("coordinator_lost")
    assert lost["kind"] == "silent"
    assert mentions(lost["why"], "2 s")


def test_silence_does_not_count_while_the_job_is_paused(joined_launcher):
    launcher = joined_launcher(commence(), m.Pause(paused=True), lost_after_s=0.05)
    later = threading.Timer(0.3, lambda: launcher.link.feed(m.Pause(paused=False), VERDICT))
    later.start()
    assert launcher.run() == 7
    later.join()
    assert [each.paused for each in launcher.handled(m.Pause)] == [True, False]


def test_ctrl_z_at_a_joined_launcher_names_the_coordinator(joined_launcher):
    launcher = joined_launcher(lambda: launcher.signals.come(signal.SIGTSTP), lambda: None, VERDICT)
    assert launcher.run() == 7
    assert mentions(launcher.records.text, "Ctrl-Z", "node 0", "h:5")


def test_paused_workers_go_on_before_they_are_asked_to_end(joined_launcher):
    launcher = joined_launcher(commence(), m.Pause(paused=True), CLOSED)
    assert launcher.run() == 69
    assert [type(each) for each in launcher.own.handled] == [m.Start, m.Pause, m.Pause, m.Stop]
    assert not launcher.handled(m.Pause)[1].paused


# --- limits


def test_no_thread_for_the_connection_is_an_error(joined_launcher, monkeypatch):
    launcher = joined_launcher(VERDICT)

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ConfigError, match="thread"):
        launcher.run()
    assert launcher.link.closed


def test_a_launcher_that_cannot_start_its_node_sends_the_reason_to_the_coordinator(joined_launcher):
    launcher = joined_launcher(VERDICT)
    launcher.own.refuses = ConfigError("no thread can be started")
    with pytest.raises(ConfigError):
        launcher.run()
    assert [type(each) for each in launcher.link.sent] == [m.AgentEnding]
