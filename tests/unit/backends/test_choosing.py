"""Options of ``-o``, and ``--address``, which is one of them."""

from __future__ import annotations

import pytest

from distlaunch.backends.accelerate import Accelerate
from distlaunch.backends.backend_options import chosen_options, given_options
from distlaunch.backends.deepspeed import DeepSpeed
from distlaunch.backends.horovod import Horovod
from distlaunch.backends.option_files import configured_backend
from distlaunch.backends.pytorch_ddp import PytorchDdp
from distlaunch.backends.ray import Ray
from distlaunch.backends.registry import find_backend
from distlaunch.cli.parser import parse_plan, parse_train
from distlaunch.core.errors import ConfigError
from tests.facts import mentions


def address(*words: str, **environ: str) -> str:
    options = parse_train(["--backend", "ray", *words, "t.py"], environ)
    backend, _ = configured_backend(find_backend(options.backend), options, {}, "/")
    assert isinstance(backend, Ray)
    return backend.address


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["--address", "h:1"], {}),
        (["--address=h:1", "-o", "address=h:1"], {}),
        ([], {"DISTLAUNCH_ADDRESS": "h:1"}),
        (["--address", "h:1"], {"DISTLAUNCH_ADDRESS": "other:1"}),
        (["--address", "h:1"], {"DISTLAUNCH_OPT": "strategy=pack ADDRESS=other:1"}),
        (["-o", "address=h:1"], {"DISTLAUNCH_ADDRESS": "other:1"}),
        (["-o", "strategy=pack"], {"DISTLAUNCH_ADDRESS": "h:1"}),
    ],
)
def test_an_address_is_an_option_and_the_command_line_overrides_the_environment(words, environ):
    assert address(*words, **environ) == "h:1"
    assert parse_plan(["--address", "h:1", "t.py"], {})[0].address == "h:1"


@pytest.mark.parametrize(
    ("text", "value"), [("0.5", 0.5), ("2", 2.0), (".25", 0.25), ("3.", 3.0), ("0", 0.0)]
)
def test_a_number_may_have_a_decimal_point(text, value):
    assert chosen_options([f"cycle-time-ms={text}"], Horovod.options(), "horovod") == {
        "cycle-time-ms": value
    }


@pytest.mark.parametrize(
    "text", ["", ".", "-1", "1e3", "0.5.1", "nan", "0.1234567890123", "1,5", "\u0663"]
)
def test_an_invalid_number_is_refused(text):
    with pytest.raises(ConfigError, match="cycle-time-ms takes MS"):
        chosen_options([f"cycle-time-ms={text}"], Horovod.options(), "horovod")


def test_the_other_options_stay():
    options = parse_train(
        ["--address", "h:1", "t.py"], {"DISTLAUNCH_OPT": "strategy=spread address=other:1"}
    )
    words = given_options(options, Ray.options(), "ray")
    assert chosen_options(words, Ray.options(), "ray") == {"strategy": "spread", "address": "h:1"}


@pytest.mark.parametrize(
    ("words", "environ", "shown"),
    [
        (
            ["--address", "a:1", "-o", "address=b:1"],
            {},
            "--address 'a:1' and -o 'address=b:1' contradict each other",
        ),
        (
            [],
            {"DISTLAUNCH_ADDRESS": "a:1", "DISTLAUNCH_OPT": "address=b:1"},
            "DISTLAUNCH_ADDRESS 'a:1' and -o 'address=b:1'",
        ),
        (["--address", ""], {}, "--address needs a value (auto|local"),
    ],
)
def test_two_addresses_or_none_are_refused(words, environ, shown):
    with pytest.raises(ConfigError) as caught:
        address(*words, **environ)
    assert shown in caught.value.message


@pytest.mark.parametrize(
    ("words", "environ"), [(["--address", "a:1"], {}), ([], {"DISTLAUNCH_ADDRESS": "a:1"})]
)
def test_a_backend_that_has_no_cluster_of_its_own_refuses_an_address(words, environ):
    options = parse_train([*words, "t.py"], environ)
    with pytest.raises(ConfigError) as caught:
        given_options(options, PytorchDdp.options(), PytorchDdp.name)
    assert mentions(
        caught.value.message, options.named("address"), "'a:1'", "--backend pytorch-ddp"
    )
    assert "--backend ray" in caught.value.hint


def test_a_choice_ignores_case():
    assert chosen_options(["nccl-debug=INFO"], PytorchDdp.options(), "pytorch-ddp") == {
        "nccl-debug": "info"
    }


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["bucket-mb=-1"], "bucket-mb takes N, a whole number from 0 to 1099511627776"),
        (
            ["bucket-mb=99999999999999999"],
            "bucket-mb takes N, a whole number from 0 to 1099511627776",
        ),
        (["static-graph", "static-graph=off"], "-o static-graph is given twice: on and off"),
        (["bucket-mb=1", "bucket_mb=2"], "-o bucket-mb is given twice: 1 and 2"),
    ],
)
def test_errors_quote_the_option_as_given(words, shown):
    with pytest.raises(ConfigError) as caught:
        chosen_options(words, PytorchDdp.options(), "pytorch-ddp")
    assert shown in caught.value.message


@pytest.mark.parametrize(
    ("backend", "word", "hint"),
    [
        (Accelerate, "zero=3", "it is an option of --backend deepspeed"),
        (PytorchDdp, "sharding=full", "it is an option of --backend fsdp"),
        (
            DeepSpeed,
            "gradient-accumulation-steps=2",
            "of --backend accelerate; here there is gradient-accumulation",
        ),
        (PytorchDdp, "bucket-mbs=3", "did you mean bucket-mb?"),
    ],
)
def test_an_option_of_another_backend_is_reported_as_such(backend, word, hint):
    with pytest.raises(ConfigError) as caught:
        chosen_options([word], backend.options(), backend.name)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "meant"), [("FSDP", "fsdp"), ("tf", "tensorflow"), ("DDP", "pytorch-ddp")]
)
def test_other_spellings_of_a_backend_are_answered_with_its_name(name, meant):
    with pytest.raises(ConfigError) as caught:
        find_backend(name)
    assert mentions(str(caught.value.hint), meant)
