from __future__ import annotations

import select
import threading

import pytest

from distlaunch.coordinator.runtime.main_loop_calls import MainLoopCalls, MainLoopClosedError


@pytest.fixture
def calls():
    calls = MainLoopCalls()
    yield calls
    calls.close()


def is_readable(calls: MainLoopCalls) -> bool:
    return bool(select.select([calls], [], [], 0)[0])


def test_a_function_runs_in_the_thread_of_the_main_loop(calls):
    found = []
    thread = threading.Thread(target=lambda: found.append(calls.call(threading.get_ident)))
    thread.start()
    thread.join()
    assert is_readable(calls)
    assert not found[0].done()
    calls.run()
    assert found[0].result(timeout=0) == threading.get_ident()
    assert not is_readable(calls)


def test_functions_run_in_order_and_an_exception_goes_to_its_caller(calls):
    order: list[int] = []
    calls.call(lambda: order.append(0))
    wrong = calls.call(lambda: order[7])
    calls.call(lambda: order.append(1))
    calls.run()
    assert order == [0, 1]
    assert isinstance(wrong.exception(timeout=0), IndexError)


def test_a_function_that_calls_again_does_not_keep_the_main_loop(calls):
    later = []
    calls.call(lambda: later.append(calls.call(lambda: 5)))
    calls.run()
    assert is_readable(calls)
    calls.run()
    assert later[0].result(timeout=0) == 5


def test_more_calls_than_a_pipe_holds_are_all_run(calls):
    futures = [calls.call(lambda: None) for _ in range(70_000)]
    calls.run()
    assert all(future.done() for future in futures)


def test_after_the_end_a_caller_gets_an_error(calls):
    waiting = calls.call(lambda: 1)
    calls.close()
    late = calls.call(lambda: 1)
    for future in (waiting, late):
        assert isinstance(future.exception(timeout=0), MainLoopClosedError)
