"""Forms of tracebacks: boxed, prefixed, encoded, cut off, inside another text."""

from __future__ import annotations

import json

import pytest

from distlaunch.diagnosis.first_cause import diagnose

PLAIN = [
    "Traceback (most recent call last):",
    '  File "/home/user/train.py", line 24, in <module>',
    "    main()",
    '  File "/home/user/train.py", line 7, in step',
    '    raise ValueError("loss is nan")',
    "ValueError: loss is nan",
]
OTHER = [
    "Traceback (most recent call last):",
    '  File "/home/user/feed.py", line 3, in feed',
    '    raise KeyError("shard")',
    "KeyError: 'shard'",
]
RICH = """\
╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /home/user/a/directory/whose/name/is/so/long/that/rich/has/to/wrap/the/line/ │
│ train.py:24 in <module>                                                      │
│                                                                              │
│   23 if True:                                                                │
│ ❱ 24     main()                                                              │
│   25                                                                         │
│ ╭──── locals ────╮                                                           │
│ │ x = 1          │                                                           │
│ ╰────────────────╯                                                           │
│                                                                              │
│ /home/user/train.py:7 in step                                                │
│                                                                              │
│    6 def step(x):                                                            │
│ ❱  7 │   raise ValueError("loss is nan")                                     │
│    8                                                                         │
╰──────────────────────────────────────────────────────────────────────────────╯
ValueError: loss is nan
"""
LOGURU = """\
2026-11-29 12:00:00.456 | ERROR    | __main__:<module>:24 - An error has been caught in function '<module>', process 'MainProcess' (4711), thread 'MainThread' (140):
Traceback (most recent call last):

> File "/home/user/train.py", line 24, in <module>
    main()
    └ <function main at 0x7f>

  File "/home/user/train.py", line 7, in step
    raise ValueError("loss is nan")

ValueError: loss is nan
"""


def prefixed(lines, shape="2026-11-29 12:00:00,{n} - train - ERROR - "):
    return "".join(f"{shape.format(n=100 + n)}{line}\n" for n, line in enumerate(lines))


def cause(end_of, text, **fields):
    return diagnose([end_of(0, text, **fields)], world_size=1).cause


@pytest.mark.parametrize(
    "text",
    [
        RICH,
        LOGURU,
        prefixed(PLAIN),
        prefixed(PLAIN, "(train_fn pid=4711, ip=10.0.0.{n}) "),
        prefixed(PLAIN, "[default0]:"),
        prefixed(PLAIN, "[1,0]<stderr>:"),
        json.dumps({"event": "failed", "level": "error", "exception": "\n".join(PLAIN)}) + "\n",
        json.dumps({"message": "failed", "details": {"stack": ["\n".join(PLAIN)]}}) + "\n",
        'time=12:00 level=error msg="failed" exc="' + "\\n".join(PLAIN).replace('"', '\\"') + '"\n',
        '{"event": "failed", "exception": [{"exc_type": "ValueError", "exc_value": "loss is nan", "frames": [{"filename": "/home/user/train.py", "lineno": 7, "name": "step"}]}]}\n',
        "\n".join(PLAIN[2:]) + "\n",
    ],
)
@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_every_form_gives_exception_and_frame(end_of, text, stream):
    fields = {"tail": text} if stream == "stderr" else {"stdout_tail": text}
    found = diagnose([end_of(0, **fields)], world_size=1).cause
    assert (found.exception_type, found.message) == ("ValueError", "loss is nan")
    assert found.frame == "train.py:7 in step"


def test_lines_of_two_threads_that_a_logger_has_mixed_are_distinguished(end_of):
    mixed = []
    for n, pair in enumerate(zip(PLAIN[:1] + PLAIN[3:], OTHER, strict=True)):
        for name, line in zip("AB", pair, strict=True):
            mixed.append(f"2026-11-29 12:00:00,{100 + n} ERROR [worker-{name}] {line}\n")
    found = cause(end_of, "".join(mixed))
    assert (found.exception_type, found.frame) == ("KeyError", "feed.py:3 in feed")


def test_message_that_rich_has_wrapped_is_whole(end_of):
    path = "/data/a/very/long/name/of/a/vocabulary/that/is/not/there/at/all.json"
    shown = f"ValueError: cannot read \n'{path}'\n"
    found = cause(end_of, RICH.replace("ValueError: loss is nan\n", shown))
    assert found.message == f"cannot read '{path}'"


def test_prefix_of_one_line_alone_changes_nothing(end_of):
    found = cause(end_of, "ERROR: " + "\n".join(PLAIN) + "\n")
    assert (found.exception_type, found.frame) == ("ValueError", "train.py:7 in step")


@pytest.mark.parametrize(
    "line",
    ['{"exc_type": ' * 2000, '{"exception": "Traceback (most recent call last):\\n', "{" * 60000],
)
def test_records_that_are_cut_or_hostile_do_no_harm(end_of, line):
    assert cause(end_of, f"{line}\n{chr(10).join(PLAIN)}\n").message == "loss is nan"


def test_child_of_a_failed_command_is_the_original_cause(end_of):
    child = '  File "<string>", line 1, in <module>\nFileNotFoundError: no tokens.bin\n'
    own = "Traceback (most recent call last):\n  File \"/p/t.py\", line 3, in <module>\n    run()\nsubprocess.CalledProcessError: Command 'prepare' returned non-zero exit status 1.\n"
    found = cause(end_of, f"Traceback (most recent call last):\n{child}{own}")
    assert found.exception_type == "subprocess.CalledProcessError"
    assert found.original == "FileNotFoundError: no tokens.bin (<string>:1 in <module>)"
    assert cause(end_of, f"prepare: cannot read shard 7\n{own}").original == (
        "prepare: cannot read shard 7"
    )


def test_launcher_inside_a_worker_gives_way_to_the_cause_in_the_same_log(end_of):
    outer = 'E1129 21:00:00.123000 4711 api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 4712)\nTraceback (most recent call last):\n  File "/v/bin/torchrun", line 8, in <module>\n    sys.exit(main())\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\ninner.py FAILED\n'
    found = cause(end_of, "\n".join(PLAIN) + "\n" + outer)
    assert (found.exception_type, found.frame) == ("ValueError", "train.py:7 in step")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Process Process-1:", "EOFError"),
        ("Process SpawnProcess-1:", "BrokenPipeError: [Errno 32] Broken pipe"),
        ("Exception in thread prefetch (fill):", "_queue.Empty"),
    ],
)
def test_dead_child_or_thread_is_the_cause_and_not_the_silence_that_followed(end_of, before, after):
    own = f'Traceback (most recent call last):\n  File "/p/t.py", line 9, in <module>\n    get()\n{after}\n'
    found = cause(end_of, f"{before}\n" + "\n".join(PLAIN) + "\n" + own)
    assert (found.exception_type, found.frame) == ("ValueError", "train.py:7 in step")


def test_device_side_assert_names_file_kernel_and_condition(end_of):
    line = "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [12,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    own = 'Traceback (most recent call last):\n  File "/p/t.py", line 9, in <module>\nRuntimeError: CUDA error: device-side assert triggered\n'
    assert cause(end_of, line + own).original == (
        "Indexing.cu:1290 in indexSelectLargeIndex: assertion `srcIndex < srcSelectDimSize` failed"
    )


def test_exception_that_all_ranks_report_is_the_one_of_the_rank_that_its_text_names(end_of):
    text = """\
Traceback (most recent call last):
  File "/home/user/train.py", line 31, in save
    dcp.save(state, checkpoint_id=path)
  File "/v/lib/python3.11/site-packages/torch/distributed/checkpoint/utils.py", line 250, in all_gather
    raise CheckpointException(step, node_failures)
torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([2])
Traceback (most recent call last): (RANK 2)
  File "/v/lib/python3.11/site-packages/torch/distributed/checkpoint/filesystem.py", line 120, in write_data
    os.fsync(stream.fileno())
OSError: [Errno 28] No space left on device
"""
    found = diagnose([end_of(rank, text) for rank in range(4)], world_size=4).cause
    assert found.ranks == (2,)
    assert (found.exception_type, found.frame) == ("OSError", "train.py:31 in save")


@pytest.mark.parametrize(
    ("source", "own"),
    [
        ('raise KeyboardInterrupt("budget used up")', True),
        ("_thread.interrupt_main()", True),
        ("signal.raise_signal(signal.SIGINT)", True),
        ("time.sleep(10)", False),
    ],
)
def test_keyboard_interrupt_of_the_script_is_not_from_outside(end_of, source, own):
    text = f'Traceback (most recent call last):\n  File "/p/t.py", line 9, in <module>\n    {source}\n    ^^^^^^^^\nKeyboardInterrupt\n'
    summary = cause(end_of, text, returncode=-2).summary
    assert ("the script raised itself" in summary) is own
    assert ("from outside" in summary) is not own


def test_abort_at_exit_keeps_the_last_lines_of_the_script(end_of):
    text = "step 3\ncannot read shard 7, giving up\nterminate called without an active exception\n"
    found = cause(end_of, text, returncode=-6)
    assert found.message == "cannot read shard 7, giving up"
    assert found.summary == "killed by SIGABRT (abort) at its exit"
