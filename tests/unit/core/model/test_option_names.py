from __future__ import annotations

import threading

import pytest

from distlaunch.core.model.option_names import (
    TRAIN_NAMES,
    Opt,
    OptionNames,
    name_of,
    option_names,
    use_names,
)

THEIRS = OptionNames(
    names={"num_nodes": "--nnodes", "gpus": "DISTLAUNCH_GPUS", "num_procs": "-np"},
    with_value={"gpus_per_node": "-H a:{},b:{}"},
    with_this_value={("device", "cpu"): "--cpu"},
    absent=frozenset({"spares", "device"}),
)


def test_the_names_are_those_of_train_unless_others_are_set():
    assert option_names() is TRAIN_NAMES
    assert f"{Opt.NUM_NODES}, {Opt.NUM_NODES(2)}" == "--num-nodes, --num-nodes 2"
    assert f"{Opt.OPT('zero=2')}; {Opt.SCRIPT}" == "-o zero=2; SCRIPT"
    assert Opt.RENDEZVOUS_PORT.exists
    assert str(Opt.RENDEZVOUS_PORT) == str(Opt.RENDEZVOUS)


@pytest.mark.parametrize(
    ("option", "value", "name", "setting"),
    [
        (Opt.NUM_NODES, 2, "--nnodes", "--nnodes 2"),
        (Opt.GPUS, "0,1", "DISTLAUNCH_GPUS", "DISTLAUNCH_GPUS=0,1"),
        (Opt.NUM_PROCS, "N", "-np", "-np N"),
        (Opt.GPUS_PER_NODE, 2, "--gpus-per-node", "-H a:2,b:2"),
        (Opt.DEVICE, "cpu", "distlaunch train --device", "--cpu"),
        (Opt.SPARES, 1, "distlaunch train --spares", "distlaunch train --spares 1"),
        (Opt.HOSTS, "a", "--hosts", "--hosts a"),
    ],
    ids=str,
)
def test_an_option_is_named_as_in_the_command_that_runs(option, value, name, setting):
    with use_names(THEIRS):
        assert (str(option), name_of(option.value), option(value)) == (name, name, setting)
        assert option.exists == (option not in (Opt.DEVICE, Opt.SPARES))


def test_the_names_hold_in_all_threads_and_end_with_the_context():
    found = []
    with pytest.raises(ValueError, match="--nnodes"), use_names(THEIRS):  # noqa: PT012 - the thread belongs to it
        thread = threading.Thread(target=lambda: found.append(str(Opt.NUM_NODES)))
        thread.start()
        thread.join()
        raise ValueError(str(Opt.NUM_NODES))
    assert found == ["--nnodes"]
    assert str(Opt.NUM_NODES) == "--num-nodes"
