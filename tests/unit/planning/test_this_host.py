from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.planning.hosts.this_host import Identity, is_this_machine, names_in
from tests.examples import examples

EXAMPLES = examples(60)
NODE = Identity(
    hostname="node1",
    fqdn="node1.a.example",
    addresses=("10.0.0.1", "2001:db8::1", "fe80::5%eth0"),
    aliases=("node1-ib", "store.b.example"),
)
SHORT = Identity(hostname="node1", fqdn="node1")
BY_FQDN = Identity(hostname="node1.a.example")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "node1",
            "NODE1",
            "node1.a.example",
            "Node1.A.Example.",
            "node1.a",
            "node1-ib",
            "node1-ib.a.example",
        ),
        *(
            "store.b.example",
            "store",
            "localhost",
            "LOCALHOST",
            "localhost.localdomain",
            "x.localhost",
            "ip6-localhost",
        ),
        *(
            "127.0.0.1",
            "127.0.1.1",
            "127.3.2.1",
            "::1",
            "0:0:0:0:0:0:0:1",
            "::ffff:127.0.0.1",
            "0.0.0.0",
            "::",
        ),
        *(
            "10.0.0.1",
            "::ffff:10.0.0.1",
            "2001:db8::1",
            "2001:DB8:0:0::1",
            "fe80::5",
            "fe80::5%eth0",
            "fe80::5%ib0",
        ),
    ],
)
def test_our_names_and_addresses_are_ours(name):
    assert is_this_machine(name, NODE)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "node2",
            "node",
            "node11",
            "node1.b.example",
            "node1.aa.example",
            "node1.a.exam",
            "node1-ib.b.example",
        ),
        *("store.a.example", "a.example", "notlocalhost", "localhost.other"),
        *(
            "10.0.0.2",
            "10.0.0.11",
            "2001:db8::2",
            "::2",
            "fe80::6%eth0",
            "128.0.0.1",
            "",
            ".",
            "1",
            "10.0.0",
            "::x",
        ),
    ],
)
def test_others_are_not(name):
    assert not is_this_machine(name, NODE)


def test_a_domain_that_is_cut_short_on_either_side_agrees():
    assert is_this_machine("node1.a", NODE)
    assert is_this_machine("node1.a.example.org", NODE)


def test_without_a_known_domain_the_short_name_decides():
    assert is_this_machine("node1.a.example", SHORT)
    assert is_this_machine("node1.b.example", SHORT)
    assert not is_this_machine("node2.a.example", SHORT)


def test_a_hostname_with_domain_gives_the_domain():
    assert is_this_machine("node1", BY_FQDN)
    assert is_this_machine("node1.a.example", BY_FQDN)
    assert not is_this_machine("node1.b.example", BY_FQDN)


@pytest.mark.parametrize(
    "fqdn", ["localhost", "localhost.localdomain", "10.0.0.1", "1.0.0.10.in-addr.arpa", "", None]
)
def test_a_resolvers_useless_answer_gives_no_domain(fqdn):
    identity = Identity(hostname="node1", fqdn=fqdn)
    assert is_this_machine("node1.a.example", identity)
    assert not is_this_machine("10.0.0.1", identity)
    assert not is_this_machine("node2", identity)


def test_a_pod_is_known_by_its_service_and_not_by_anothers():
    pod = Identity(hostname="job-0", fqdn="job-0.workers.team.svc.cluster.local")
    assert is_this_machine("job-0.workers", pod)
    assert is_this_machine("job-0.workers.team.svc", pod)
    assert not is_this_machine("job-0.others", pod)
    assert not is_this_machine("job-1.workers", pod)


def test_a_single_foreign_host_is_foreign():
    """DeepSpeed#713: ``--include worker-1`` typed on worker-0 ran there, since it was only one
    host."""
    assert not is_this_machine("worker-1", Identity(hostname="worker-0"))


def test_machine_without_a_name_is_only_localhost():
    nameless = Identity(hostname="localhost", fqdn="localhost.localdomain")
    assert is_this_machine("localhost", nameless)
    assert not is_this_machine("node1", nameless)


ETC_HOSTS = """\
127.0.0.1\tlocalhost
127.0.1.1\tnode1.a.example node1   # as Debian has it
::1 ip6-localhost ip6-loopback

10.0.0.1 node1-ib node1-ib.a.example
10.0.0.2 node2 node2-ib
10.0.0.2 both
10.0.0.1 both
2001:DB8:0::1 six
fe00::0 ip6-localnet
# 10.0.0.1 commented
nonsense here
10.0.0.1
"""


def test_etc_hosts_gives_our_further_names():
    ours = names_in(ETC_HOSTS, ("10.0.0.1", "2001:db8::1"))
    assert ours == ("node1.a.example", "node1", "node1-ib", "node1-ib.a.example", "six")
    assert names_in(ETC_HOSTS, ()) == ("node1.a.example", "node1")


TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([*"a1.:%[]- \n#", "127.", "::1", "node1"]), max_size=12).map("".join),
)


@given(TEXTS, TEXTS, st.none() | TEXTS, st.lists(TEXTS, max_size=3).map(tuple), TEXTS)
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_name_gets_an_answer(name, hostname, fqdn, others, hosts_file):
    identity = Identity(
        hostname=hostname, fqdn=fqdn, addresses=others, aliases=names_in(hosts_file, others)
    )
    assert is_this_machine(name, identity) in {True, False}
