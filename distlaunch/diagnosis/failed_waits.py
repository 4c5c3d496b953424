"""Find out in which call ranks waited for the awaited ranks, and why the wait ended. No I/O.

The call stands in the messages of libraries and in the stacks of the ranks that waited.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from distlaunch.core.model.record import Record, assert_never
from distlaunch.core.model.text import name_ranks, printable
from distlaunch.diagnosis.clean_text import shorten_middle
from distlaunch.diagnosis.evidence import FailureEvidence
from distlaunch.diagnosis.model import FailedWait, Mechanism, WaitKind
from distlaunch.diagnosis.stack_parser import StackView, ThreadStack
from distlaunch.diagnosis.waits import Wait, Waiting, find_wait

_NAME_CHARS = 80
_DIGITS = 18
_UNITS = {"ms": 0.001, "s": 1.0, "seconds": 1.0}


class _Text(Record):
    """A message of a library about a wait. Groups of the pattern: ``time`` and ``unit`` or
    ``clock``, ``joined``, ``expected``, ``key``, ``call``, ``number``."""

    pattern: re.Pattern[str]
    mechanism: Mechanism
    kind: WaitKind | None = None
    """None: the stack of the rank shows it."""


_TEXTS: tuple[_Text, ...] = (
    # torch 1.9 to 2.13: "[Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 2000 ms"
    _Text(
        pattern=re.compile(r"failed to pass monitoredBarrier(?: in (?P<time>\d+) ?(?P<unit>ms))?"),
        mechanism=Mechanism.MONITORED_BARRIER,
        kind=WaitKind.BARRIER,
    ),
    # torch 1.11 to 2.13: "Timed out after 4 seconds waiting for clients. 3/4 clients joined."
    _Text(
        pattern=re.compile(
            r"Timed out after (?P<time>\d+) (?P<unit>seconds) waiting for clients\. "
            r"(?P<joined>\d+)/(?P<expected>\d+) clients joined"
        ),
        mechanism=Mechanism.TCP_STORE,
        kind=WaitKind.RENDEZVOUS,
    ),
    # torch 1.9 to 2.13: "Timed out initializing process group in store based barrier on rank: 0, for
    # key: store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:30:00)"; since 2.1
    # "num_workers_joined"
    _Text(
        pattern=re.compile(
            r"Timed out initializing process group in store based barrier .{0,160}?"
            r"\(world_size=(?P<expected>\d+), (?:worker_count|num_workers_joined)=(?P<joined>\d+), "
            r"timeout=(?P<clock>\d+:\d\d:\d\d)"
        ),
        mechanism=Mechanism.STORE_BARRIER,
        kind=WaitKind.RENDEZVOUS,
    ),
    # torch 1.9 to 2.13: "The client socket has timed out after 600000ms while trying to connect to
    # (172.17.0.9, 46229)."; until 1.13 "1800s"
    _Text(
        pattern=re.compile(
            r"client socket has timed out after (?P<time>\d+) ?(?P<unit>ms|s) while trying to connect"
        ),
        mechanism=Mechanism.TCP_STORE_CONNECTION,
        kind=WaitKind.RENDEZVOUS,
    ),
    # torch 2.0 to 2.13: "[Rank 1] Watchdog caught collective operation timeout:
    # WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523,
    # Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
    _Text(
        pattern=re.compile(
            r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), "
            r"OpType=(?P<call>\w+)(?:[^)\n]*Timeout\((?P<unit>ms)\)=(?P<time>\d+))?"
        ),
        mechanism=Mechanism.NCCL_WATCHDOG,
        kind=WaitKind.COLLECTIVE,
    ),
    # Horovod 0.19 to 0.28: "... for more than 60 seconds. ... Missing ranks:\n2: [allreduce.grad]"
    _Text(
        pattern=re.compile(
            r"for more than (?P<time>\d+) (?P<unit>seconds)\.[^\[]{0,300}Missing ranks:\s*\d+: "
            r"\[(?P<call>[\w./-]+)"
        ),
        mechanism=Mechanism.HOROVOD,
        kind=WaitKind.COLLECTIVE,
    ),
    # Horovod 0.16 to 0.28: "Stalled ops:allreduce.loss [missing ranks: 2, 3]"
    _Text(
        pattern=re.compile(r"Stalled ops: ?(?P<call>[\w./-]+) \[missing ranks"),
        mechanism=Mechanism.HOROVOD,
        kind=WaitKind.COLLECTIVE,
    ),
    # torch 2.0 to 2.13: "wait timeout after 5000ms, keys: /vocab". Older versions wrote "Timeout
    # waiting for key: default_pg/0/0 after 5000 ms".
    _Text(
        pattern=re.compile(
            r"wait timeout after (?P<time>\d+) ?(?P<unit>ms), keys: /?(?P<key>[^\s,]+)",
            re.IGNORECASE,
        ),
        mechanism=Mechanism.TCP_STORE,
    ),
    _Text(
        pattern=re.compile(
            r"timeout waiting for key: /?(?P<key>[^\s,]+)(?: after (?P<time>\d+) ?(?P<unit>ms))?",
            re.IGNORECASE,
        ),
        mechanism=Mechanism.TCP_STORE,
    ),
    # gloo of torch 1.0 to 2.13: "Timed out waiting 2000ms for recv operation to complete"
    _Text(
        pattern=re.compile(r"Timed out waiting (?P<time>\d+) ?(?P<unit>ms) for \w+ operation"),
        mechanism=Mechanism.GLOO,
    ),
    _Text(pattern=re.compile(r"Application timeout caused pair closure"), mechanism=Mechanism.GLOO),
)
"""The most informative texts first."""
_IN_LOGS = (
    Mechanism.MONITORED_BARRIER,
    Mechanism.NCCL_WATCHDOG,
    Mechanism.HOROVOD,
    Mechanism.TCP_STORE_CONNECTION,
)
"""Messages of native code, which are no part of an exception. They are looked up in the whole log."""
_GROUP = re.compile(r"^default_pg/\d+//")
_KEY_OF_TORCH = re.compile(r"default_pg|store_based_barrier|worker_count|torchelastic|rank|init/")
"""Parts of keys that torch sets itself."""
_OF_LIBRARY = {
    "Horovod": Mechanism.HOROVOD,
    "mpi4py": Mechanism.MPI,
    "JAX's": Mechanism.JAX,
    "TensorFlow's": Mechanism.TENSORFLOW,
    "Ray's": Mechanism.RAY,
}
"""The first words of the names in ``waits``."""
_BARRIERS = ("barrier", "monitored_barrier", "Barrier", "sync_global_devices")
_RENDEZVOUS = ("init_process_group", "TCPStore", "_store_based_barrier", "init_device_mesh", "init")
_NO_NAME = ("wait", "wait_tensor", "synchronize", "mpi4py")
"""Functions that wait for any collective."""


class WaitingCall(Record):
    """The call in which a rank waited, by its stack."""

    name: str
    """The name in ``waits``: ``torch.distributed all_reduce``."""
    kind: WaitKind
    function: str | None
    """None if the function waits for any collective."""
    mechanism: Mechanism | None


def key_of(text: str) -> str | None:
    """Return the key of the script's own for which ranks have waited at a store, without torch's
    prefix. Return None if torch has chosen the key."""
    for each in _TEXTS:
        if "key" in each.pattern.groupindex and (found := each.pattern.search(text)) is not None:
            return _own_key(found["key"])
    return None


def call_of_wait(wait: Wait | None) -> WaitingCall | None:
    """Return a call of a stack as that in which a rank waited; None if it need not wait for other
    ranks."""
    if wait is None or (wait.waiting is not Waiting.SURELY and wait.name != "backward"):
        return None
    library, _, _ = wait.name.partition(" ")
    function = wait.name.rpartition(" ")[2]
    kind = WaitKind.COLLECTIVE
    if function in _BARRIERS:
        kind = WaitKind.BARRIER
    elif function in _RENDEZVOUS:
        kind = WaitKind.RENDEZVOUS
    elif wait.name == "a store of torch.distributed":
        kind = WaitKind.KEY
    named = kind is not WaitKind.KEY and function not in _NO_NAME
    return WaitingCall(
        name=wait.name,
        kind=kind,
        function=function if named else None,
        mechanism=_OF_LIBRARY.get(library),
    )


def call_of(evidence: FailureEvidence, script_dir: str) -> WaitingCall | None:
    """Return the call in which a failed rank waited, by the traceback of its exception; None if
    that shows none."""
    frames = tuple(reversed(evidence.frames))
    if not frames:
        return None
    return call_of_wait(find_wait(StackView(ThreadStack(frames=frames), script_dir)))


def find_failed_wait(
    victims: Sequence[FailureEvidence],
    logs: Mapping[int, str],
    waiting: Mapping[int, WaitingCall],
    *,
    awaited: Collection[int],
    script_dir: str,
) -> FailedWait | None:
    """Return in which call the victims waited for the awaited ranks. Return None if neither a
    message nor a stack shows it.

    * ``logs``: the last output of the failed ranks.
    * ``waiting``: the calls in which ranks that had not failed waited, by their stacks.
    """
    victims = [one for one in victims if one.end.rank not in awaited]
    call = next(filter(None, (call_of(one, script_dir) for one in victims)), None)
    text, found = _first_text(victims, {rank: logs[rank] for rank in logs if rank not in awaited})
    if call is None and found is None:
        return None
    groups = {} if found is None else {k: v for k, v in found.groupdict().items() if v}
    key = _own_key(groups.get("key", ""))
    kind = text.kind if text is not None else None
    kind = kind or (WaitKind.KEY if key else None) or (call.kind if call else None)
    function = groups.get("call") or (call.function if call else None)
    same = {
        rank
        for rank, other in waiting.items()
        if rank not in awaited and call is not None and other.name == call.name
    }
    return FailedWait(
        kind=kind or WaitKind.COLLECTIVE,
        mechanism=text.mechanism if text is not None else (call.mechanism if call else None),
        ranks=tuple(sorted({one.end.rank for one in victims} | same)),
        call=None if function is None else shorten_middle(printable(function), _NAME_CHARS),
        timeout_s=_seconds(groups),
        sequence=_number(groups.get("number")),
        joined=_number(groups.get("joined")),
        expected=_number(groups.get("expected")),
        key=None if key is None else shorten_middle(printable(key), _NAME_CHARS),
    )


def how_it_ended(wait: FailedWait) -> str:
    """Return a clause on what ended the wait: ``gloo timed out after 2 s``. Return an empty text if
    nothing is known of it."""
    after = "" if wait.timeout_s is None else f" after {wait.timeout_s:g} s"
    match wait.mechanism:
        case None:
            return ""
        case Mechanism.MONITORED_BARRIER:
            return f"monitoredBarrier timed out{after}"
        case Mechanism.TCP_STORE | Mechanism.STORE_BARRIER:
            counted = ""
            if wait.joined is not None and wait.expected is not None:
                counted = f"{wait.joined} of {wait.expected} joined, "
            return f"{counted}TCPStore timed out{after}"
        case Mechanism.TCP_STORE_CONNECTION:
            return f"their connections to its TCPStore timed out{after}"
        case Mechanism.GLOO:
            return f"gloo timed out{after}"
        case Mechanism.NCCL_WATCHDOG:
            return f"NCCL's watchdog timed out{after}"
        case Mechanism.NCCL_HEARTBEAT:
            return f"its NCCL heartbeat monitor ended it: the watchdog was stuck{_for(wait)}"
        case Mechanism.HOROVOD:
            return f"Horovod stalled{_for(wait)}"
        case Mechanism.TENSORFLOW:
            return "TensorFlow gave up"
        case Mechanism.JAX:
            return "JAX gave up"
        case Mechanism.RAY:
            return "Ray gave up"
        case Mechanism.MPI:
            return "MPI gave up"
        case _:
            assert_never(wait.mechanism)


def what_they_missed(wait: FailedWait) -> str:
    """Return what the awaited ranks did not come to, with the ranks that waited there: ``the
    all_reduce that ranks 0-1 waited in``."""
    ranks = name_ranks(wait.ranks)
    match wait.kind:
        case WaitKind.BARRIER:
            return f"the barrier that {ranks} waited for"
        case WaitKind.RENDEZVOUS:
            where = "init_process_group" if wait.call in (None, "TCPStore") else wait.call
            return f"the process group that {ranks} waited for in {where}"
        case WaitKind.KEY:
            name = "a key" if wait.key is None else f"the key {wait.key}"
            return f"{name} of the store that {ranks} waited for"
        case WaitKind.COLLECTIVE:
            call = "the collective" if wait.call is None else f"the {wait.call}"
            if wait.call == "backward":
                call = "the collective in backward"
            number = "" if wait.sequence is None else f" (SeqNum {wait.sequence})"
            return f"{call}{number} that {ranks} waited in"
        case _:
            assert_never(wait.kind)


def how_they_stayed_away(wait: FailedWait) -> str:
    """Return what awaited ranks did not do: ``did not come to the barrier that ranks 0-2 waited
    for``."""
    missed = what_they_missed(wait)
    match wait.kind:
        case WaitKind.RENDEZVOUS:
            return f"did not join {missed}"
        case WaitKind.KEY:
            return f"did not set {missed}"
        case WaitKind.BARRIER | WaitKind.COLLECTIVE:
            return f"did not come to {missed}"
        case _:
            assert_never(wait.kind)


def _for(wait: FailedWait) -> str:
    return "" if wait.timeout_s is None else f" for {wait.timeout_s:g} s"


def _own_key(key: str) -> str | None:
    key = _GROUP.sub("", key)
    if not key or "//" in key or key.isdigit() or _KEY_OF_TORCH.search(key):
        return None
    return key


def _first_text(
    victims: Sequence[FailureEvidence], logs: Mapping[int, str]
) -> tuple[_Text | None, re.Match[str] | None]:
    told = [f"{one.message or ''}\n{one.text}" for one in victims]
    for each in _TEXTS:
        for text in (*told, *(logs.values() if each.mechanism in _IN_LOGS else ())):
            if (found := each.pattern.search(text)) is not None:
                return each, found
    return None, None


def _seconds(groups: Mapping[str, str]) -> float | None:
    if "clock" in groups:
        hours, minutes, seconds = (int(part) for part in groups["clock"].split(":"))
        return 3600.0 * hours + 60.0 * minutes + seconds
    number = _number(groups.get("time"))
    return None if number is None else number * _UNITS[groups["unit"].lower()]


def _number(digits: str | None) -> int | None:
    return None if digits is None or len(digits) > _DIGITS else int(digits)
