"""Tracebacks of Python 3.11 (run), and of 3.10, 3.13 and 3.14 (by their documentation)."""

from __future__ import annotations

import textwrap

import pytest

from distlaunch.diagnosis.first_cause import diagnose
from tests.facts import mentions


def explained(end_of, tail, **fields):
    data = textwrap.dedent(tail) if isinstance(tail, str) else tail
    return diagnose([end_of(2, data, **fields)], world_size=4).cause


PLAIN = """\
    Traceback (most recent call last):
      File "/home/user/project/train.py", line 50, in <module>
        main()
      File "/home/user/project/train.py", line 42, in step
        loss = model(batch)
               ^^^^^^^^^^^^
      File "/home/user/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl
        return forward_call(*args, **kwargs)
    ValueError: bad batch
    """


def test_innermost_frame_is_the_users_not_the_librarys(end_of):
    cause = explained(end_of, PLAIN)
    assert (cause.exception_type, cause.message, cause.frame) == (
        "ValueError",
        "bad batch",
        "train.py:42 in step",
    )


def test_python_310_without_markers(end_of):
    tail = PLAIN.replace("               ^^^^^^^^^^^^\n", "")
    assert explained(end_of, tail).frame == "train.py:42 in step"


def test_python_313_colours_are_taken_out(end_of):
    cause = explained(
        end_of,
        "Traceback (most recent call last):\n"
        '  File \x1b[35m"/home/user/train.py"\x1b[0m, line \x1b[35m7\x1b[0m, in \x1b[35mstep\x1b[0m\n'
        "    \x1b[31mf\x1b[0m\x1b[1;31m(1)\x1b[0m\n    \x1b[31m~\x1b[0m\x1b[1;31m^^^\x1b[0m\n"
        "\x1b[1;35mTypeError\x1b[0m: \x1b[35mf() takes 0 positional arguments but 1 was given\x1b[0m\n",
    )
    assert (cause.exception_type, cause.frame) == ("TypeError", "train.py:7 in step")
    assert cause.message == "f() takes 0 positional arguments but 1 was given"


def test_python_313_multi_line_expression_with_markers(end_of):
    cause = explained(
        end_of,
        """\
        Traceback (most recent call last):
          File "/p/a.py", line 3, in <module>
            total = add(
                    1,
            ...<2 lines>...
                    4,
                    )
          File "/p/a.py", line 1, in add
            raise KeyError("x")
        KeyError: 'x'
        """,
    )
    assert (cause.exception_type, cause.frame) == ("KeyError", "a.py:1 in add")


def test_torn_head_is_enough(end_of):
    tail = textwrap.dedent(PLAIN).partition("main()")[2]
    cause = explained(end_of, tail)
    assert (cause.message, cause.frame) == ("bad batch", "train.py:42 in step")


def test_traceback_after_an_unfinished_progress_bar(end_of):
    cause = explained(
        end_of,
        " 10%|#   | 1/10 [00:01<00:09]\r 20%|##  | 2/10 [00:02<00:08]" + textwrap.dedent(PLAIN),
    )
    assert (cause.message, cause.frame) == ("bad batch", "train.py:42 in step")


def test_foreign_lines_in_between_do_no_harm(end_of):
    lines = textwrap.dedent(PLAIN).splitlines()
    lines.insert(3, "UserWarning: something unrelated")
    lines.insert(5, "[W1128 00:45:12.345 socket.cpp:200] retrying")
    lines.insert(8, " 40%|####      | 4/10 [00:01<00:02, 2.1it/s]")
    lines.insert(-1, "epoch: 3")
    cause = explained(end_of, "\n".join(lines))
    assert (cause.exception_type, cause.message, cause.frame) == (
        "ValueError",
        "bad batch",
        "train.py:42 in step",
    )


def test_bytes_that_are_no_text_do_no_harm(end_of):
    cause = explained(
        end_of, b"\xff\xfe\x00\x80" + textwrap.dedent(PLAIN).encode().replace(b"bad", b"b\xc3d\x00")
    )
    assert cause.exception_type == "ValueError"
    assert "\x00" not in str(cause)


def test_rank_prefix_of_torch_is_taken_off(end_of):
    tail = "\n".join(f"[rank2]: {line}" for line in textwrap.dedent(PLAIN).splitlines())
    assert explained(end_of, tail).message == "bad batch"


def test_last_traceback_wins_over_a_handled_one(end_of):
    handled = textwrap.dedent(PLAIN).replace("bad batch", "first try")
    assert (
        explained(
            end_of, f"ERROR:root:will retry\n{handled}retrying\n" + textwrap.dedent(PLAIN)
        ).message
        == "bad batch"
    )


def test_handled_traceback_followed_by_much_output_is_history(end_of):
    tail = (
        textwrap.dedent(PLAIN) + "".join(f"step {n} done\n" for n in range(60)) + "loss diverged\n"
    )
    cause = explained(end_of, tail)
    assert (cause.exception_type, cause.message) == (None, "loss diverged")


@pytest.mark.parametrize(
    ("sentence"),
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_chain_names_outermost_and_original(end_of, sentence):
    second = (
        textwrap.dedent(PLAIN)
        .replace("ValueError: bad batch", "KeyError: 'first'")
        .replace("42", "12")
    )
    third = textwrap.dedent(PLAIN).replace(
        "ValueError: bad batch", "project.errors.StepError: step 7 failed"
    )
    cause = explained(
        end_of, f"{second}\n{sentence}\n\n{textwrap.dedent(PLAIN)}\n{sentence}\n\n{third}"
    )
    assert (cause.exception_type, cause.message) == ("project.errors.StepError", "step 7 failed")
    assert cause.original == "KeyError: 'first' (train.py:12 in step)"


def test_message_of_several_lines_with_a_chain_after_it(end_of):
    first = textwrap.dedent(PLAIN).replace("bad batch", "bad batch\n\n  expected: 3\n  got: 4\n")
    cause = explained(
        end_of,
        f"{first}\nDuring handling of the above exception, another exception occurred:\n\n{textwrap.dedent(PLAIN)}",
    )
    assert cause.exception_type == "ValueError"


def test_notes_are_shown(end_of):
    cause = explained(end_of, textwrap.dedent(PLAIN) + "while reading shard 3\n")
    assert "while reading shard 3" in cause.excerpt


def test_nested_group_names_the_first_leaf(end_of):
    cause = explained(
        end_of,
        """\
          + Exception Group Traceback (most recent call last):
          |   File "/p/a.py", line 9, in <module>
          |     raise outer
          | ExceptionGroup: outer (2 sub-exceptions)
          +-+---------------- 1 ----------------
            | Exception Group Traceback (most recent call last):
            |   File "/p/a.py", line 5, in <module>
            |     raise inner
            | ExceptionGroup: inner (1 sub-exception)
            +-+---------------- 1 ----------------
              | Traceback (most recent call last):
              |   File "/p/a.py", line 2, in leaf
              |     raise OSError("disk gone")
              | OSError: disk gone
              +------------------------------------
            +---------------- 2 ----------------
            | TypeError: 2
            +------------------------------------
        """,
    )
    assert (cause.exception_type, cause.message) == ("ExceptionGroup", "outer")
    assert cause.original == "OSError: disk gone (a.py:2 in leaf)"


def test_group_whose_leaves_were_never_raised(end_of):
    cause = explained(
        end_of,
        """\
          + Exception Group Traceback (most recent call last):
          |   File "/p/a.py", line 1, in <module>
          |     raise ExceptionGroup("g", [ValueError(1)])
          | ExceptionGroup: g (1 sub-exception)
          +-+---------------- 1 ----------------
            | ValueError: 1
            +------------------------------------
        """,
    )
    assert (cause.frame, cause.original) == ("a.py:1 in <module>", "ValueError: 1")


def test_syntax_error_in_an_imported_module(end_of):
    diagnosis = diagnose(
        [
            end_of(
                0,
                "Traceback (most recent call last):\n"
                '  File "/p/train.py", line 1, in <module>\n    import model\n'
                '  File "/p/model.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n',
            )
        ],
        world_size=1,
    )
    assert (diagnosis.cause.frame, diagnosis.repeats) == ("model.py:3", "syntax error")


def test_indentation_error_repeats(end_of):
    end = end_of(0, '  File "/p/t.py", line 3\n    x = 1\nIndentationError: unexpected indent\n')
    assert diagnose([end], world_size=1).repeats == "syntax error"


def test_thread_traceback_gives_way_to_the_main_one(end_of):
    thread = "Exception in thread Thread-3 (work):\n" + textwrap.dedent(PLAIN).replace(
        "bad batch", "of a thread"
    )
    assert explained(end_of, textwrap.dedent(PLAIN) + thread).message == "bad batch"
    assert explained(end_of, thread + textwrap.dedent(PLAIN)).message == "bad batch"


def test_thread_traceback_wins_over_a_consequence_in_the_main_thread(end_of):
    thread = "Exception in thread Thread-3 (work):\n" + textwrap.dedent(PLAIN).replace(
        "bad batch", "of a thread"
    )
    lost = textwrap.dedent(PLAIN).replace(
        "ValueError: bad batch",
        "RuntimeError: [/g/gloo/pair.cc:5] Connection closed by peer [::1]:4",
    )
    assert explained(end_of, thread + lost).message == "of a thread"


@pytest.mark.parametrize(
    "head",
    [
        "Exception ignored in: <function Pool.__del__ at 0x7f>",
        "Exception ignored in atexit callback <function f at 0x7f>:",
        "Exception ignored while calling deallocator <function f at 0x7f>:",
        "Task exception was never retrieved",
        "--- Logging error ---",
    ],
)
def test_ignored_exception_is_never_the_cause_beside_another(end_of, head):
    ignored = f"{head}\n" + textwrap.dedent(PLAIN).replace("bad batch", "at exit")
    assert explained(end_of, textwrap.dedent(PLAIN) + ignored).message == "bad batch"
    assert explained(end_of, f"{ignored}no data left\n").message == "no data left"


def test_ignored_exception_is_named_where_there_is_nothing_else(end_of):
    cause = explained(
        end_of,
        "Exception ignored in: <function f at 0x7f>\n" + textwrap.dedent(PLAIN),
        returncode=120,
    )
    assert cause.message == "bad batch"


def test_a_child_process_of_multiprocessing_is_named_if_the_parent_writes_nothing(end_of):
    cause = explained(end_of, "Process SpawnProcess-2:\n" + textwrap.dedent(PLAIN), returncode=4)
    assert cause.message == "bad batch"
    assert mentions(cause.summary, "code 4", "child process")


def test_exception_of_a_pool_worker_keeps_the_workers_frame(end_of):
    tail = (
        'multiprocessing.pool.RemoteTraceback: \n"""\n'
        + textwrap.dedent(PLAIN)
        + '"""\n\nThe above exception was the direct cause of the following exception:\n\n'
        + "Traceback (most recent call last):\n"
        + '  File "/home/user/project/train.py", line 99, in <module>\n    pool.map(step, range(3))\nValueError: bad batch\n'
    )
    cause = explained(end_of, tail)
    assert (cause.message, cause.frame, cause.original) == (
        "bad batch",
        "train.py:42 in step",
        None,
    )


def test_package_file_names_keep_their_directory(end_of):
    cause = explained(
        end_of,
        'Traceback (most recent call last):\n  File "/p/model/__init__.py", line 3, in f\n    g()\nKeyError: 1\n',
    )
    assert cause.frame == "model/__init__.py:3 in f"


def test_local_exception_class_and_empty_message(end_of):
    cause = explained(
        end_of,
        'Traceback (most recent call last):\n  File "/p/t.py", line 3, in f\n    raise E\nmain.<locals>.E\n',
    )
    assert (cause.exception_type, cause.message) == ("main.<locals>.E", None)


def test_exception_line_alone_is_not_repeated_in_the_message_and_long_text_is_cut(end_of):
    cause = explained(end_of, textwrap.dedent(PLAIN).replace("bad batch", "x" * 9000))
    assert cause.message is not None
    assert len(cause.message) <= 600
    assert all(len(line) <= 300 for line in cause.excerpt)
    assert len(cause.excerpt) <= 20


def test_traceback_cut_off_before_its_exception_is_no_exception(end_of):
    cause = explained(
        end_of,
        'Traceback (most recent call last):\n  File "/p/t.py", line 3, in f\n    g()\n',
        returncode=9,
    )
    assert cause.exception_type is None
