"""Workers' records of their collectives: read from a socket, and parsed as torch writes them."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import time

import pytest

from distlaunch.core.agent.workers import flight_record as f


def entry(number: int, **changed) -> dict:
    """Return an entry of a record, as torch 2.13 writes it for gloo."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[7, 8]],
        "is_p2p": False,
        "op_id": number,
        "output_sizes": [[7, 8]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "record_id": 6,
        "retired": False,
        "state": "scheduled",
        "timeout_ms": 1800000,
        **changed,
    }


def record(*entries: dict, enqueued="7", completed="6") -> dict:
    status = {
        "last_completed_collective": completed,
        "last_enqueued_collective": enqueued,
        "last_started_collective": "-1",
    }
    return {"entries": list(entries), "pg_status": {"0": status}, "version": "2.10"}


@pytest.mark.parametrize("as_bytes", [lambda value: json.dumps(value).encode(), pickle.dumps])
def test_the_oldest_collective_that_has_not_ended_is_the_pending_one(as_bytes):
    entries = [
        entry(8, profiling_name="gloo:barrier"),
        entry(7),
        entry(6, retired=True),
        entry(5, is_p2p=True),
        entry(4, state="completed"),
    ]
    [group] = f.parse_record(as_bytes(record(*entries, enqueued="8")))
    assert (group.number, group.name) == ("0", "default_pg")
    assert (group.enqueued, group.pending) == (8, 7)
    assert (group.operation, json.loads(group.sizes)) == ("all_reduce", [[7, 8]])


def test_a_rank_that_has_ended_all_has_no_pending_one():
    [group] = f.parse_record(json.dumps(record(enqueued="6")).encode())
    assert (group.enqueued, group.pending, group.operation) == (6, None, "")


def test_groups_have_the_name_that_is_the_same_in_all_workers():
    """Group numbers of torch count the groups of a worker: group 2 of the job may be a worker's second group."""
    made = {"distlaunch_groups": [["0", "default_pg"], ["2", "pair"]]}
    status = {"1": {"last_enqueued_collective": "4"}}
    data = json.dumps({**made, "entries": [], "pg_status": status}).encode()
    default, pair = sorted(f.parse_record(data), key=lambda each: each.number)
    assert (pair.number, pair.name, pair.enqueued) == ("2", "pair", 4)
    assert (default.number, default.name, default.enqueued) == ("0", "default_pg", 0)
    waits = entry(5, pg_id=1, process_group=["2", "pair"])
    data = json.dumps({**made, "entries": [waits], "pg_status": status}).encode()
    assert f.parse_record(data)[0].number == "2"


def test_groups_that_do_not_fit_the_record_are_not_believed():
    made = {"distlaunch_groups": [["3", "made after others were destroyed"]]}
    [group] = f.parse_record(json.dumps({**made, **record(entry(7))}).encode())
    assert (group.number, group.name) == ("0", "default_pg")


def test_names_are_not_believed_if_a_group_has_a_number_above_all_that_are_left():
    """Group 1 was destroyed: the second group that is left has number 2, not 1."""
    made = {"distlaunch_groups": [["0", "default_pg"], ["2", "pair"]]}
    status = {"0": {"last_enqueued_collective": "9"}, "2": {"last_enqueued_collective": "4"}}
    data = json.dumps({**made, "entries": [], "pg_status": status}).encode()
    found = {group.number: (group.name, group.enqueued) for group in f.parse_record(data)}
    assert found == {"0": ("", 9), "2": ("", 4)}


class Runs:
    """Its pickle would make a directory."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def nested_tuples(depth: int) -> tuple:
    """Return a tuple that takes 2**depth steps to hash."""
    value: tuple = ()
    for _ in range(depth):
        value = (value, value)
    return value


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_of_any_protocol_of_torch_is_read(protocol):
    [group] = f.parse_record(pickle.dumps(record(entry(7)), protocol=protocol))
    assert (group.pending, group.name) == (7, "default_pg")


@pytest.mark.parametrize("opener", [b"}", b"\x8f"], ids=["dict", "set"])
def test_a_key_that_takes_forever_to_hash_is_refused(opener):
    body = pickle.dumps(nested_tuples(80), protocol=4)[11:-1]
    into = b"K\x01s" if opener == b"}" else b"\x90"
    mark = b"" if opener == b"}" else b"("
    assert f.parse_record(b"\x80\x04" + opener + mark + body + into + b".") == ()


def test_nested_values_are_read():
    assert f.parse_record(pickle.dumps({**record(), "more": nested_tuples(80)})) != ()


def test_a_pickle_that_names_a_function_is_refused(tmp_path):
    data = pickle.dumps({**record(), "more": Runs(tmp_path / "made")})
    assert f.parse_record(data) == ()
    assert not (tmp_path / "made").exists()
    assert f.parse_record(pickle.dumps(record())) != ()


def nested(levels: int) -> list:
    """Return lists that share their items, so that their text has 2**levels of them."""
    shared: list = []
    for _ in range(levels):
        shared = [shared, shared]
    return shared


@pytest.mark.parametrize(
    "changed",
    [
        {"input_sizes": nested(60)},
        {"input_sizes": [nested(60)]},
        {"input_sizes": [[1] * 17]},
        {"input_sizes": [["x"]]},
        {"input_sizes": [[1 << 70]]},
        {"process_group": ["0", nested(60)]},
        {"profiling_name": nested(60)},
        {"pg_id": nested(60)},
    ],
)
def test_a_record_with_lists_in_place_of_text_has_no_groups(changed):
    assert f.parse_record(pickle.dumps(record({**entry(7), **changed}))) == ()


def test_the_sizes_of_many_tensors_are_cut():
    [group] = f.parse_record(pickle.dumps(record(entry(7, input_sizes=[[7, 8]] * 100_000))))
    assert len(group.sizes) == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b"\x80\x04",
        b"garbage",
        json.dumps({"pg_status": {"0": {}}}).encode(),
        json.dumps(record({"pg_id": 0})).encode(),
        json.dumps(record(enqueued="x")).encode(),
        json.dumps({"entries": 7, "pg_status": []}).encode(),
        json.dumps({**record(entry(7)), "distlaunch_groups": [7]}).encode(),
        json.dumps({**record(entry(7)), "distlaunch_groups": [[[], {}]]}).encode(),
        b"{" + b" " * (5 << 20),
    ],
)
def test_anything_else_has_no_groups(data):
    assert f.parse_record(data) == ()


class Worker:
    """Listens as a worker does, in this process, and answers with ``data``."""

    def __init__(self, cookie: str, data: bytes | None) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f.socket_name(cookie, os.getpid()))
        self.listener.listen(1)
        self._data = data
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            client, _ = self.listener.accept()
        except OSError:
            return
        self._kept.append(client)
        if self._data is not None:
            client.sendall(self._data)
            client.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in (self.listener, *self._kept):
            each.close()


@pytest.fixture
def make_worker():
    workers = []

    def make(data: bytes | None) -> str:
        cookie = os.urandom(8).hex()
        workers.append(Worker(cookie, data))
        return cookie

    yield make
    for worker in workers:
        worker.close()


def test_a_worker_that_listens_is_asked(make_worker):
    cookie = make_worker(json.dumps(record(entry(7))).encode())
    found = f.read_records(cookie, {5: os.getpid(), 6: 1}, until_s=time.monotonic() + 20)
    assert found[5][0].pending == 7
    assert 6 not in found, "no such worker listens"


def test_a_worker_that_does_not_answer_is_not_waited_for(make_worker):
    cookie = make_worker(None)
    assert f.read_records(cookie, {5: os.getpid()}, until_s=time.monotonic() + 0.3) == {}


def test_another_process_that_has_taken_the_name_is_not_believed(make_worker):
    cookie = os.urandom(8).hex()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f.socket_name(cookie, os.getppid()))
    listener.listen(1)
    assert f.read_records(cookie, {5: os.getppid()}, until_s=time.monotonic() + 0.3) == {}
    listener.close()
