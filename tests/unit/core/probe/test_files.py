from __future__ import annotations

import pytest

from distlaunch.core.probe.files import read_bounded


@pytest.mark.parametrize(("most", "message"), [(4096, "4,096 bytes"), (2 << 20, "2 MiB")])
def test_a_file_that_is_too_long_is_refused_with_the_limit(most, message):
    with pytest.raises(OSError, match=f"{message}"):
        read_bounded("/dev/zero", most=most, timeout_s=60.0)
