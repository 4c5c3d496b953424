from __future__ import annotations

import pytest

from distlaunch.backends.registry import find_backend
from distlaunch.core.errors import ConfigError
from distlaunch.planning.backend import PlannedBackend
from distlaunch.planning.interfaces import addresses, check_interface, names_of_loopback
from distlaunch.planning.master_address import AddressChooser, usable_by
from distlaunch.planning.train_options import TrainOptions
from tests.unit.planning.node_reports import DOCKER, node, reached, way


@pytest.mark.parametrize(
    ("written", "named", "host", "interface", "expected"),
    [
        (["eth0 10.0.0.1/24"], (), "a", None, ["10.0.0.1"]),
        (
            ["lo 127.0.0.1/8", "lo ::1/128", "eth0 10.0.0.1/24", "eth0 fe80::1/64"],
            (),
            "a",
            None,
            ["10.0.0.1"],
        ),
        (["eth0 169.254.3.4/16", "eth1 10.0.0.1/24"], (), "a", None, ["10.0.0.1"]),
        ([DOCKER, "eth0 10.0.0.1/24"], (), "a", None, ["10.0.0.1", "172.17.0.1"]),
        (
            [
                "virbr0 192.168.122.1/24",
                "br-a1b2 172.18.0.1/16",
                "wg0 10.9.0.1/24",
                "ib0 10.0.0.1/24",
            ],
            (),
            "a",
            None,
            ["10.0.0.1", "10.9.0.1", "192.168.122.1", "172.18.0.1"],
        ),
        (["eth0 fd00::1/64", "eth0 10.0.0.1/24"], (), "a", None, ["10.0.0.1", "fd00::1"]),
        (["eth0 fd00::1/64"], (), "a", None, ["fd00::1"]),
        (
            ["eth0 10.0.0.1/24", "eth1 10.1.0.1/24"],
            ("10.1.0.1",),
            "a",
            None,
            ["10.1.0.1", "10.0.0.1"],
        ),
        (
            ["eth0 10.0.0.1/24", "eth1 10.1.0.1/24"],
            ("127.0.1.1",),
            "a",
            None,
            ["10.0.0.1", "10.1.0.1"],
        ),
        (
            ["eth0 10.0.0.1/24", "eth1 10.1.0.1/24"],
            ("10.0.0.1",),
            "10.1.0.1",
            None,
            ["10.1.0.1", "10.0.0.1"],
        ),
        ([DOCKER, "eth0 10.0.0.1/24"], (), "172.17.0.1", None, ["172.17.0.1", "10.0.0.1"]),
        (["eth0 10.0.0.1/24", "eth1 10.1.0.1/24"], (), "a", "eth1", ["10.1.0.1"]),
        (
            ["eth0 10.0.0.1/24", "eth1 10.1.0.1/24", "eth1 fd00::1/64"],
            (),
            "a",
            "eth1",
            ["10.1.0.1", "fd00::1"],
        ),
        (["eth0 10.0.0.1/24", "eth1 10.1.0.1/24"], (), "a", "10.1.0.0/16", ["10.1.0.1"]),
        (["eth0 10.0.0.1/24", "eth0 fd00:1::5/64"], (), "a", "fd00:1::/32", ["fd00:1::5"]),
        (["lo 10.255.0.3/32", "eth0 169.254.0.1/16"], (), "a", None, ["10.255.0.3"]),
    ],
)
def test_addresses_come_best_first(make_surveyed, written, named, host, interface, expected):
    reported = node(make_surveyed, "a", *written, named=named)
    assert list(addresses(reported, host, interface=interface)) == expected


@pytest.mark.parametrize(
    ("named", "interface", "expected"),
    [
        ((), None, ["10.1.0.1", "10.0.0.1"]),
        (("10.0.0.1",), None, ["10.0.0.1", "10.1.0.1"]),
        ((), "eth0", ["10.0.0.1"]),
    ],
)
def test_the_schedulers_address_is_the_first_if_the_nodes_own_name_leads_to_none(
    make_surveyed, named, interface, expected
):
    reported = node(make_surveyed, "a", "eth0 10.0.0.1/24", "eth1 10.1.0.1/24", named=named)
    assert (
        list(addresses(reported, "a", interface=interface, of_scheduler=["10.1.0.1"])) == expected
    )


def test_the_schedulers_address_is_tried_if_the_node_does_not_know_it_as_its_own(make_surveyed):
    reported = node(make_surveyed, "a", "eth0 10.0.0.1/24")
    assert addresses(reported, "a", interface=None, of_scheduler=["192.0.2.7"]) == (
        "10.0.0.1",
        "192.0.2.7",
    )
    alone = node(make_surveyed, "a", "lo 127.0.0.1/8")
    assert addresses(alone, "a", interface=None, of_scheduler=["127.0.0.1"]) == ("127.0.0.1",)


def test_the_users_address_stands_alone(make_surveyed):
    reported = node(make_surveyed, "a", "eth0 10.0.0.1/24")
    choice = AddressChooser(
        TrainOptions(master_addr="gw.example"), PlannedBackend(), rendezvous_host="10.0.0.1"
    )
    assert choice.candidates(reported, "a", of_scheduler=lambda _: ["192.0.2.7"]) == ("gw.example",)


def test_a_schedulers_address_that_all_nodes_have_reached_is_taken(make_surveyed):
    surveys = [
        node(make_surveyed, "a", "eth0 10.0.0.1/24"),
        node(make_surveyed, "b", "eth0 10.0.0.2/24"),
    ]
    choice = AddressChooser(TrainOptions(), PlannedBackend())
    answers = {1: reached(way("192.0.2.7", "10.0.0.2", "eth0"))}
    met = choice.choose(surveys, answers, ("a", "b"), of_scheduler={"a": ["192.0.2.7"]}.__getitem__)
    assert met.address == "192.0.2.7"


@pytest.mark.parametrize("interface", ["eth7", "10.9.0.0/16", "fd00::/8", "lo"])
def test_a_node_without_such_an_interface_is_named_with_what_it_has(make_surveyed, interface):
    reported = node(make_surveyed, "b", "lo 127.0.0.1/8", "eth0 10.0.0.1/24", "ib0 10.1.0.1/16")
    with pytest.raises(ConfigError, match=r"--interface: n7 has no ") as caught:
        addresses(reported, "n7", interface=interface)
    assert caught.value.hint == "it has eth0 10.0.0.1/24, ib0 10.1.0.1/16"


def test_a_node_with_loopback_alone_cannot_be_met(make_surveyed):
    with pytest.raises(ConfigError, match=r"^n7 .* address"):
        addresses(node(make_surveyed, "n7", "lo 127.0.0.1/8"), "n7", interface=None)


@pytest.mark.parametrize(
    "text", ["eth0", "ib0", "enp3s0f1np1", "bond0.100", "10.0.0.0/8", "10.1.2.3/16", "fd00::/8"]
)
def test_names_and_networks_are_interfaces(text):
    check_interface(text)


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.1",
        "10.0.0.0/33",
        "a b",
        "fd00:::/8",
        "x" * 16,
        "/",
        "10.0.0/x",
        "eth0/24",
        "\n",
        "é" * 9,
    ],
)
def test_an_invalid_value_is_refused_early(text):
    with pytest.raises(ConfigError) as caught:
        check_interface(text)
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_where_ipv4_is_needed_other_addresses_are_left_out_and_a_host_without_is_named():
    class Old(PlannedBackend):
        name = "old"
        ipv4_only = "workers of old speak IPv4 alone"

    assert usable_by(PlannedBackend(), ("fd00::1",), "n1") == ("fd00::1",)
    assert usable_by(Old(), ("fd00::1", "10.0.0.1", "n1"), "n1") == ("10.0.0.1", "n1")
    assert usable_by(Old(), (), "n1") == ()
    with pytest.raises(
        ConfigError, match="speak IPv4 alone, but n1 has only fd00::1, fd00::2"
    ) as caught:
        usable_by(Old(), ("fd00::1", "fd00::2"), "n1")
    assert "--interface" in str(caught.value.hint)


def test_own_names_that_lead_to_loopback_are_found_where_there_are_others(make_surveyed):
    good = node(make_surveyed, "n1", "eth0 10.0.0.1/24", named=("10.0.0.1",))
    astray = node(make_surveyed, "n2", "eth0 10.0.0.2/24", named=("127.0.1.1", "10.0.0.2"))
    assert (
        names_of_loopback([good, good], ["n1", "n3"])
        == names_of_loopback([astray, astray], ["n2", "n2"])
        == {}
    )
    assert names_of_loopback([good, astray], ["n1", "n2"]) == {"n2": "127.0.1.1"}
    horovod, other = (find_backend(name)({}, {}) for name in ("horovod", "pytorch-ddp"))
    other.check_nodes([good, astray], ["n1", "n2"])
    horovod.check_nodes([good, good], ["n1", "n3"])
    with pytest.raises(ConfigError, match=r"n2: .* 127\.0\.1\.1") as caught:
        horovod.check_nodes([good, astray], ["n1", "n2"])
    assert "/etc/hosts of n2" in str(caught.value.hint)
