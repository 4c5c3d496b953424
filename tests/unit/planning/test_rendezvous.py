from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.planning.master_address import rendezvous_endpoint
from distlaunch.planning.train_options import TrainOptions


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:5:5",
        "[fe80::1%%eth0]",
        "[fe80::1%]:5",
        "[10.0.0.1:5]:6",
        "256.1.1.1",
        "10.0.0.1%eth0:5",
        "1.2.3:5",
    ],
)
def test_a_host_that_looks_like_an_address_must_be_one(text):
    with pytest.raises(ConfigError, match=r"^--rendezvous: .* IP address") as error:
        rendezvous_endpoint(TrainOptions(rendezvous=text))
    assert error.value.exit_code == 2
    assert error.value.hint


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("10.0.0.1:5", "10.0.0.1"),
        ("[fe80::1%eth0]:5", "fe80::1%eth0"),
        ("n1.x2:5", "n1.x2"),
        ("7:5", "7"),
    ],
)
def test_addresses_and_names_are_places(text, host):
    assert rendezvous_endpoint(TrainOptions(rendezvous=text)) == (host, 5)
