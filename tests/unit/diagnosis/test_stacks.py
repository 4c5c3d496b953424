"""Stacks of Python 3.8 to 3.13 and of py-spy (recorded), and of 3.14 (made by hand after 3.13)."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.diagnosis.stack_parser import StackView, main_thread, package_of, parse_stacks

HERE = Path(__file__).parent
PROJECT = "/home/user/project"
PYTHONS = ("python38", "python39", "python310", "python311", "python312", "python313")
ALONE = sorted(
    path.name.removesuffix(".python311.json")
    for path in (HERE / "recorded_stacks").glob("*.python311.json")
)


def recorded(name: str, rank: int = 0) -> str:
    text: str = json.loads((HERE / "recorded_stacks" / f"{name}.json").read_text(encoding="utf-8"))[
        rank
    ]["text"]
    return text


def view_of(text: str, script_dir: str = PROJECT) -> StackView:
    main = main_thread(parse_stacks(text))
    assert main is not None
    return StackView(main, script_dir)


def place_of(text: str) -> str:
    return str(view_of(text).place)


@pytest.mark.parametrize("maker", [*PYTHONS, "py-spy"])
def test_the_main_thread_speaks_for_a_worker_whatever_printed_its_stacks(maker):
    text = recorded(f"lock.{maker}")
    assert len(parse_stacks(text)) == 2
    assert place_of(text).endswith(" in lock")
    assert view_of(text).shown(9)[-1].endswith(" in <module>")


@pytest.mark.parametrize("maker", [*PYTHONS, "py-spy"])
def test_the_innermost_frame_is_the_scripts_not_the_standard_librarys(maker):
    view = view_of(recorded(f"queue.{maker}"))
    assert str(view.place).endswith(" in queue")
    assert [frame.function for frame in view.below] == ["wait", "get"]


@pytest.mark.parametrize("maker", PYTHONS)
def test_a_deep_recursion_is_cut_and_shown_in_three_lines(maker):
    shown = view_of(recorded(f"recursion.{maker}")).shown(9)
    assert shown[0].endswith(" in deep")
    assert shown[2].startswith("… the same ")
    assert shown[-1] == "…"
    assert len(shown) <= 4


@pytest.mark.parametrize("maker", PYTHONS)
def test_a_module_that_is_being_imported_is_the_users_place(maker):
    text = recorded(f"slow_import.{maker}")
    assert place_of(text) == "slow_module.py:5 in <module>"
    assert any("frames of importlib" in line for line in view_of(text).shown(9))


def test_where_the_main_thread_blocks_the_signal_it_still_speaks():
    text = recorded("blocked_signal.python311")
    assert parse_stacks(text)[0].current
    assert place_of(text).endswith(" in load_batch")


def test_of_more_threads_than_are_shown_none_is_taken_for_the_main_one():
    threads = parse_stacks(recorded("many_threads.python311"))
    assert len(threads) == 100
    assert main_thread(threads) is None


@pytest.mark.parametrize("kind", ALONE)
def test_every_recorded_stack_is_read_and_printable(kind):
    text = recorded(f"{kind}.python311")
    for thread in parse_stacks(text):
        assert all(line.isprintable() for line in StackView(thread, PROJECT).shown(20))
    assert text.count("  File ") == sum(len(thread.frames) for thread in parse_stacks(text))


PYTHON_314 = textwrap.dedent(
    """\
    Thread 0x00007f0518fe16c0 [loader [1] (most recent call first):
      File "/home/user/project/data.py", line 4 in read
      File "/usr/lib/python3.14/threading.py", line 1024 in run
      File "/usr/lib/python3.14/threading.py", line 1082 in _bootstrap_inner
      File "/usr/lib/python3.14/threading.py", line 1044 in _bootstrap

    Current thread 0x00007f05197cdb80 [python] (most recent call first):
      Garbage-collecting
      File "/home/user/project/train.py", line 8 in step
      File "/home/user/project/train.py", line 9 in <module>

    Current thread's C stack trace (most recent call first):
      Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x31 [0x5b27f7cadab4]
      Binary file "/usr/bin/python3.14", at +0x281aab [0x5b27f7cd9aab]
      <truncated rest of calls>
    """
)


def test_python_314_names_its_threads_and_may_add_a_c_stack():
    loader, main = parse_stacks(PYTHON_314)
    assert loader.name == "loader [1"
    assert main_thread([loader, main]) is main
    assert [str(frame) for frame in main.frames] == ["train.py:8 in step", "train.py:9 in <module>"]
    assert not main.cut


def test_a_free_threaded_python_shows_the_current_thread_only():
    text = (
        "<Cannot show all threads while the GIL is disabled>\n"
        "Stack (most recent call first):\n"
        '  File "/home/user/project/train.py", line 8 in step\n'
    )
    assert place_of(text) == "train.py:8 in step"


def test_of_two_dumps_the_later_counts():
    assert place_of(recorded("sleep.python311") + "\n" + recorded("lock.python311")).endswith(
        " in lock"
    )


def test_a_thread_without_a_python_frame_has_no_place():
    main = main_thread(
        parse_stacks(
            "Current thread 0x00007f05197cdb80 (most recent call first):\n  <no Python frame>\n"
        )
    )
    assert main is not None
    assert StackView(main, PROJECT).place is None
    assert StackView(main, PROJECT).shown(9) == []


def test_names_that_are_no_ascii_are_shown_as_they_are():
    text = (
        "Current thread 0x00007f05197cdb80 (most recent call first):\n"
        '  File "/home/j\\xfcrgen/\\u8bad\\u7ec3.py", line 8 in gr\\xf6\\xdfe\n'
    )
    assert place_of(text) == "训练.py:8 in größe"


@pytest.mark.parametrize("escape", ["\\x1b", "\\x07", "\\U00110000", "\\ud800", "\\u202e"])
def test_an_escape_that_would_give_something_unprintable_stays_one(escape):
    text = f'Current thread 0x0 (most recent call first):\n  File "/p/{escape}.py", line 8 in f\n'
    assert place_of(text) == f"{escape}.py:8 in f"


def test_lines_and_files_that_python_does_not_know_are_no_obstacle():
    text = "Current thread 0x0 (most recent call first):\n  File ???, line ??? in ???\n"
    assert place_of(text) == "???:0 in ???"


def test_a_line_that_was_torn_is_left_out():
    whole = 'Current thread 0x0 (most recent call first):\n  File "/p/train.py", line 12 in load\n'
    torn = whole + '  File "/p/train.py", line 345 in mai'
    assert [str(frame) for frame in parse_stacks(torn)[0].frames] == ["train.py:12 in load"]


def test_a_beginning_that_was_torn_does_not_hurt():
    text = recorded("lock.python311")
    assert place_of(text[text.index("line") :]).endswith(" in lock")


@pytest.mark.parametrize(
    "text",
    ["", "\n", "\x00\xff", "Thread", 'File "a", line 1 in b', "Thread 0x0 (most", "(" * 9999],
)
def test_an_invalid_stack_gives_none(text):
    assert parse_stacks(text) == []


@given(
    st.text(
        alphabet=st.sampled_from(
            'Thread 0x1f()[]"\\:\n  File, line 12 in (most recent call first):Current\x1b\x00'
        )
    )
)
def test_no_text_hurts(text):
    for thread in parse_stacks(f"Current thread 0x0 (most recent call first):\n{text}\n{text}"):
        view = StackView(thread, PROJECT)
        assert all(line.isprintable() for line in view.shown(9))
        hash(view.key(None))


def test_a_flood_of_threads_and_frames_is_bounded():
    text = "".join(
        f'Thread 0x{number:x} (most recent call first):\n  File "{"x" * 3000}", line 1 in f\n'
        for number in range(1000)
    )
    threads = parse_stacks(text * 3)
    assert 0 < len(threads) <= 256
    assert max(len(frame.file) for thread in threads for frame in thread.frames) <= 1000


def dump(*frames: tuple[str, int, str]) -> str:
    lines = [f'  File "{file}", line {line} in {function}\n' for file, line, function in frames]
    return "Current thread 0x0 (most recent call first):\n" + "".join(lines)


LIB = "/home/user/venv/lib/python3.11/site-packages"
TORCH = f"{LIB}/torch"
TRAINER = f"{LIB}/lightning/trainer.py"
SCRIPT = (f"{PROJECT}/train.py", 9, "<module>")


def test_a_script_in_site_packages_is_the_users_when_it_is_what_runs():
    folder = f"{TORCH}/examples"
    text = dump((f"{TORCH}/nn/functional.py", 5, "linear"), (f"{folder}/mnist.py", 7, "step"))
    assert str(view_of(text, script_dir=folder).place) == "mnist.py:7 in step"
    assert str(view_of(text).place) == "functional.py:5 in linear"


def test_a_venv_beside_the_script_is_not_the_users():
    text = dump((f"{PROJECT}/.venv/lib/python3.11/site-packages/torch/a.py", 5, "f"), SCRIPT)
    assert place_of(text) == "train.py:9 in <module>"


def test_frames_outside_of_the_script_are_not_shown():
    runner = ("<frozen runpy>", 88, "_run_code")
    ours = ("/opt/distlaunch/core/agent/workers/warm_start.py", 12, "run")
    assert view_of(dump(SCRIPT, runner, ours)).shown(9) == ["train.py:9 in <module>"]


def test_polling_loops_are_one_place_wherever_they_were_caught():
    one = dump((f"{TORCH}/data.py", 10, "poll"), (f"{TORCH}/data.py", 70, "__next__"), SCRIPT)
    two = dump(
        ("/usr/lib/python3.11/selectors.py", 4, "select"),
        ("/usr/lib/python3.11/queue.py", 17, "get"),
        (f"{TORCH}/data.py", 12, "poll"),
        (f"{TORCH}/data.py", 70, "__next__"),
        SCRIPT,
    )
    assert view_of(one).key(None) == view_of(two).key(None)


def test_an_import_is_one_place_however_far_it_has_come():
    find = ("<frozen importlib._bootstrap>", 1176, "_find_and_load")
    one = dump(
        (f"{TORCH}/nn/functional.py", 70, "<module>"),
        find,
        (f"{TORCH}/__init__.py", 9, "<module>"),
        find,
        SCRIPT,
    )
    two = dump(
        (f"{LIB}/sympy/core.py", 1, "<module>"),
        find,
        (f"{TORCH}/__init__.py", 70, "<module>"),
        find,
        SCRIPT,
    )
    assert view_of(one).key(None) == view_of(two).key(None) == view_of(dump(find, SCRIPT)).key(None)


def test_different_calls_of_one_trainer_are_different_places():
    fit = (TRAINER, 300, "fit")
    loading = dump(
        (f"{TORCH}/utils/data/dataloader.py", 70, "__next__"), (TRAINER, 500, "fetch"), fit, SCRIPT
    )
    stepping = dump((f"{TORCH}/optim/adam.py", 70, "step"), (TRAINER, 510, "optimise"), fit, SCRIPT)
    assert view_of(loading).key(None) != view_of(stepping).key(None)


def test_lines_of_the_script_make_different_places():
    other = (f"{PROJECT}/train.py", 10, "<module>")
    assert view_of(dump(SCRIPT)).key(None) != view_of(dump(other)).key(None)


def test_a_trainer_between_two_frames_of_the_user_is_one_line():
    between = [(TRAINER, number, f"f{number}") for number in range(12)]
    step = (f"{PROJECT}/model.py", 3, "training_step")
    assert view_of(dump(step, *between, SCRIPT)).shown(9) == [
        "model.py:3 in training_step",
        "… 12 frames of lightning",
        "train.py:9 in <module>",
    ]


def test_no_more_lines_than_asked_for_and_the_innermost_are_kept():
    calls = [(f"{PROJECT}/train.py", number, f"f{number}") for number in range(20)]
    shown = view_of(dump(*calls, SCRIPT)).shown(6)
    assert len(shown) == 6
    assert shown[0] == "train.py:0 in f0"
    assert shown[-2:] == ["… 16 more lines", "train.py:9 in <module>"]


@pytest.mark.parametrize(
    ("file", "package"),
    [
        (f"{TORCH}/nn/functional.py", "torch"),
        ("/v/lib/python3/dist-packages/six.py", "six"),
        ("<frozen importlib._bootstrap>", "importlib"),
        ("/usr/lib/python3.11/queue.py", "the standard library"),
    ],
)
def test_a_librarys_package_is_named(file, package):
    assert package_of(file) == package
