from __future__ import annotations

import errno

from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.agent.workers import worker_table as t
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import spawner_messages as w
from tests.examples import examples


@given(data=st.data(), ranks=st.integers(0, 4), attempts=st.integers(1, 2))
@settings(max_examples=examples(50), deadline=None)
def test_every_exit_is_reported_once_and_the_end_comes_last(make_node, data, ranks, attempts):
    node = make_node()
    for attempt in range(attempts):
        run_one_attempt(node, data, ranks, attempt)


def run_one_attempt(node, data, ranks: int, attempt: int) -> None:
    node.actions.clear()
    node.start(ranks, attempt=attempt)
    unborn, alive, undrained, stops, sweeping = list(range(ranks)), [], [], 0, ranks == 0
    received: list = []
    closing = done = False
    while not done:
        can = ["spawned"] * bool(unborn) + ["exited"] * bool(alive) + ["drained"] * bool(undrained)
        can += (
            ["swept"] * sweeping
            + ["closed"] * closing
            + ["tick"] * (node.table.deadline() is not None)
            + ["stop"] * (stops < 2)
        )
        assert can, "the table waits for something that nobody owes"
        node.now += data.draw(st.sampled_from([0.0, 0.3, 2.0]))
        choice = data.draw(st.sampled_from(can))
        actions: list = []
        if choice == "spawned":
            rank = unborn.pop(0)
            if data.draw(st.booleans()):
                actions = node.spawned(rank)
                alive.append(rank)
            else:
                actions = node.not_spawned(rank, "fork", errno.EAGAIN)
        elif choice == "exited":
            rank = data.draw(st.sampled_from(alive))
            alive.remove(rank)
            actions = node.ended(rank, data.draw(st.sampled_from([0, 1, -9])))
        elif choice == "drained":
            rank = data.draw(st.sampled_from(undrained))
            undrained.remove(rank)
            actions = node.drained(rank)
        elif choice == "tick":
            node.now = max(node.now, node.table.deadline())
            actions = node.tick()
        elif choice == "stop":
            stops += 1
            actions = node.stop(
                attempt=attempt, grace_s=data.draw(st.sampled_from([0.0, 1.0, 5.0]))
            )
        elif choice == "swept":
            actions = node.swept()
        elif choice == "closed":
            actions = node.closed()
        undrained += [action.exit.rank for action in node.of(t.Drain, actions)]
        sweeping = (sweeping or bool(node.of(w.Sweep, actions))) and not node.of(
            t.CloseOutputs, actions
        )
        closing = closing or bool(node.of(t.CloseOutputs, actions))
        done = bool(node.of(m.AttemptEnded, actions))
        for sent in node.of(w.Signal, actions):
            assert sent.ranks, "a signal to nobody"
        received += [
            action for action in actions if isinstance(action, (WorkerExit, m.AttemptEnded))
        ]
    assert sorted(one.rank for one in received[:-1]) == list(range(ranks))
    assert received[-1] == m.AttemptEnded(attempt=attempt, left=())
    assert node.table.deadline() is None
