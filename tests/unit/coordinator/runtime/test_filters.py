"""Lines that are copied into a file of their own, in any chunks."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distlaunch.coordinator.runtime.records import LineFilter
from distlaunch.coordinator.runtime.run_directory import folder_name
from distlaunch.core.model.run_files import (
    TORCHRUN,
    TRAIN,
    is_output_folder,
    is_output_of_distlaunch,
)
from tests.examples import examples


@pytest.fixture
def copy(tmp_path):
    return tmp_path / "filtered_stdout.log"


def test_lines_with_one_of_the_texts_are_copied_with_their_ranks_prefix(copy):
    lines = LineFilter([b"apple", b"pear"], {0: b"[0]:", 1: b"[1]:"})
    lines.begin(str(copy))
    lines.output(0, b"an app")
    lines.output(1, b"a pear\nnothing\n")
    lines.output(0, b"le\nnothing\nthe last pear")
    lines.output(2, b"apple of a rank that is not tee'd\n")
    lines.rank_ended(0)
    lines.close()
    assert copy.read_bytes() == b"[1]:a pear\n[0]:an apple\n[0]:the last pear\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(25))
@given(st.lists(st.binary(max_size=8)))
def test_chunks_make_no_difference(copy, chunks: list[bytes]):
    copy.unlink(missing_ok=True)
    lines = LineFilter([b"a"], {0: b">"})
    lines.begin(str(copy))
    for chunk in chunks:
        lines.output(0, chunk)
    lines.rank_ended(0)
    lines.close()
    whole = b"".join(chunks).split(b"\n")
    assert copy.read_bytes() == b"".join(b">" + line + b"\n" for line in whole if b"a" in line)


def test_each_attempt_has_a_file_of_its_own_and_an_endless_line_stays_small(copy, tmp_path):
    lines = LineFilter([b"x"], {0: b""})
    lines.begin(str(copy))
    for _ in range(40):
        lines.output(0, b"x" * 10_000)
        assert len(lines._begun.get(0, b"")) <= 64 << 10
    lines.begin(str(tmp_path / "second"))
    lines.output(0, b"x\n")
    lines.close()
    assert (tmp_path / "second").read_bytes() == b"x\n"


def test_a_file_that_a_worker_put_at_our_path_is_not_written_to(copy):
    os.mkfifo(copy)
    lines = LineFilter([b"x"], {0: b""})
    lines.begin(str(copy))
    lines.output(0, b"x\n")
    lines.close()


@pytest.mark.parametrize(
    ("run_id", "folder"),
    [
        ("job7", "job7_00ff"),
        ("a/b c", "a-b-c_00ff"),
        ("../../etc", "etc_00ff"),
        ("", "run_00ff"),
        ("...", "run_00ff"),
        ("-x", "x_00ff"),
        ("é" * 100, "é" * 45 + "_00ff"),
        ("\udcff\n\0", "run_00ff"),
    ],
)
def test_a_run_id_makes_a_folders_name_that_stays_in_its_place(run_id, folder):
    assert folder_name(run_id, b"\x00\xff") == folder


@pytest.mark.parametrize("layout", [TRAIN, TORCHRUN])
def test_all_that_a_layout_names_is_known_as_ours(layout):
    files = {layout.log_path("/r", 3, 12, stream) for stream in (1, 2)}
    files |= {
        layout.error_files("/r", 3)(12),
        layout.stacks_path("/r", 3, 12),
        layout.filtered_path("/r", 3, 1),
    }
    for path in files:
        *folders, name = path.removeprefix("/r/").split("/")
        assert is_output_of_distlaunch(name)
        assert all(map(is_output_folder, folders))
    assert not is_output_of_distlaunch("checkpoint.pt")
    assert not is_output_folder("checkpoints")
