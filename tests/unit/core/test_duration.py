from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.duration import format_age, format_duration, read_duration
from distlaunch.render.request import duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("30", 30.0),
        ("2.5", 2.5),
        (".5s", 0.5),
        ("30s", 30.0),
        ("30 sec", 30.0),
        ("10min", 600.0),
        ("5m", 300.0),
        ("2hours", 7200.0),
        ("2 Hours", 7200.0),
        ("1h30m", 5400.0),
        ("1h 30min", 5400.0),
        ("1.5d", 129_600.0),
    ],
)
def test_a_duration_is_read_in_seconds(text, seconds):
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "s",
        ".",
        "-1s",
        "+1",
        "nan",
        "inf",
        "1e3",
        "1_0",
        "1.2.3",
        "\u0664",
        "5ms",
        "5x",
        "1h30",
    ],
)
def test_other_texts_are_no_duration(text):
    assert read_duration(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 7200),
        ("90m", 5400),
        ("2hours", 7200),
        ("0.5s", 1),
        ("12:00:00", 43_200),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("1-12:00:00", 129_600),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["0", "12:00", "1-", "-12", "12:60:00", "9999999999s"])
def test_a_time_limit_that_is_unclear_or_out_of_range_is_refused(text):
    with pytest.raises(ConfigError, match="--time"):
        duration_s(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (0.0, "0 s"),
        (0.25, "250 ms"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.99, "1 min"),
        (60, "1 min"),
        (250, "4 min 10 s"),
        (3600, "1 h"),
        (7530, "2 h 5 min"),
        (90_000, "1 d 1 h"),
        (float("inf"), "?"),
        (float("nan"), "?"),
    ],
)
def test_a_duration_is_written_with_its_two_largest_units(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0.9, "0s"),
        (59, "59s"),
        (60, "1m 0s"),
        (3661, "1h 1m"),
        (90_000, "1d 1h"),
        (float("inf"), "?"),
        (float("nan"), "?"),
    ],
)
def test_an_age_is_short(seconds, text):
    assert format_age(seconds) == text
