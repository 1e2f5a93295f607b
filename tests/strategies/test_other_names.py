"""What others call strategies, and sizes that are no numbers: what to write is told."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import piper
from piper import Order, Place, Split, Strategy, strategies, where
from piper.errors import InputError, PiperError, StrategyError
from piper.job.arguments import given_strategy
from piper.strategies import BUILDERS, from_orders, gpipe, one_f_one_b
from piper.strategies.other_names import MEANT, named


@pytest.mark.parametrize("name", MEANT)
def test_names_of_others_lead_to_a_builder(name: str) -> None:
    with pytest.raises(InputError, match=f"there is no {name}\n  fix: write strategies.") as error:
        getattr(strategies, name)

    call = str(error.value).rpartition("fix: write ")[2]
    call += "" if "(" in call else "(pp=2, microbatches=4)"
    made = eval(call, {"strategies": strategies, "N": 2})
    assert isinstance(made, Strategy)
    assert not hasattr(strategies, name)


def test_other_names_are_unknown_as_in_python() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'gpip'") as error:
        strategies.gpip  # type: ignore[attr-defined]  # noqa: B018

    assert error.value.name == "gpip" and error.value.obj is None  # else Python adds its own hint


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        ({"pp": 2.0}, "pp=2.0 is not a whole number", "write pp=2"),
        ({"pp": "2"}, "pp='2' is not a whole number", "write pp=2"),
        ({"microbatches": 4.5}, "microbatches=4.5 is not a whole number", "write microbatches=4"),
        ({"dp": "two"}, "dp='two' is not a whole number", "write dp=2"),
        ({"tp": 2.0}, "tp=2.0 is not a whole number", "write tp=2"),
        ({"world_size": 2}, "a schedule has no option world_size", "write dp=..."),
    ],
)
def test_sizes_are_whole_numbers(given: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(StrategyError) as error:
        strategies.one_f_one_b(**{"pp": 2, "microbatches": 4, **given})

    assert str(error.value).partition(": ")[2] == f"{what}\n  fix: {fix}"


ONE = Order([where(PP=0, MB=0, PASS="F")])
OTHERS: dict[str, tuple[Callable[[], object], str]] = {
    "a schedule by an option": (
        lambda: one_f_one_b(pp=2, microbatches=4, schedule="zbv"),  # type: ignore[call-arg]
        "each schedule is a builder of its own\n  fix: write strategies.zbv(...)",
    ),
    "a schedule that is none": (
        lambda: gpipe(pp=2, microbatches=4, schedule="nix"),  # type: ignore[call-arg]
        "fix: choose one of gpipe, 1f1b, ",
    ),
    "orders without a list": (
        lambda: from_orders(ONE, ONE, ONE),  # type: ignore[arg-type, call-arg, misc]
        "from_orders was given 3 orders\n  fix: write one list: from_orders([first, last])",
    ),
    "directives without a list": (
        lambda: Strategy(Split("MB", 2), ONE),  # type: ignore[arg-type]
        "it was given 2 directives, and no list\n  fix: write one list: Strategy([Place(...), ",
    ),
    "one directive without a list": (
        lambda: Strategy(ONE),  # type: ignore[arg-type]
        "it was given 1 directive, and no list\n  fix: write one list: Strategy([",
    ),
    "a strategy that changes": (
        lambda: Strategy([ONE]).append(ONE),  # type: ignore[attr-defined]
        "it has no append\n  fix: write strategy + [directive]: a strategy does not change",
    ),
    "a file of JSON": (
        lambda: Strategy([ONE]).to_json("x.json"),  # type: ignore[arg-type]
        "takes nothing\n  fix: write Path('x.json').write_text(strategy.to_json())",
    ),
    "tags without a filter": (
        lambda: Place(PP=0, devices=[0]),  # type: ignore[call-arg]
        "Place takes tags in a filter, as its first argument\n"
        "  fix: write Place(where(PP=0), devices=[0])",
    ),
    "tags beside a filter": (
        lambda: Place(where(), [0], PP=0),  # type: ignore[call-arg]
        "Place has no option PP\n",
    ),
    "a builder in capitals": (
        lambda: strategies.FSDP,
        "there is no FSDP\n  fix: write strategies.one_f_one_b(pp=1, dp=N, zero=3, microbatches=1)",
    ),
    "a wrapper of piper": (
        lambda: piper.DDP,  # type: ignore[attr-defined]
        "piper: there is no DDP\n  fix: write piper.strategies.one_f_one_b(pp=1, dp=N, micro",
    ),
    "processes": (
        lambda: piper.init,  # type: ignore[attr-defined]
        "fix: leave it out: `piper run train.py -n 2` starts processes",
    ),
    "a prepared model": (
        lambda: piper.prepare,  # type: ignore[attr-defined]
        "fix: write trainer = piper.Trainer(model, loss_fn, strategy, example=batch)",
    ),
    "the builders": (
        lambda: piper.strategy,  # type: ignore[attr-defined]
        "fix: write piper.strategies.one_f_one_b(pp=2, microbatches=8), or piper.Strategy([...])",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_habits_of_other_systems_get_what_to_write(name: str) -> None:
    call, message = OTHERS[name]

    with pytest.raises(PiperError) as error:
        call()

    assert message in str(error.value)


GIVEN: dict[str, Any] = {
    "ddp": "write piper.strategies.one_f_one_b(pp=1, dp=N, microbatches=1)",
    "FSDP": "write piper.strategies.one_f_one_b(pp=1, dp=N, zero=3, microbatches=1)",
    "1f1b": "write piper.strategies.one_f_one_b(pp=2, microbatches=8)",
    "zbv": "write piper.strategies.zbv(pp=2, microbatches=8)",
    "interleaved": "write piper.strategies.interleaved_one_f_one_b(pp=2, microbatches=8)",
    "s.json": "write piper.Strategy.from_json(Path('s.json').read_text())",
    "nothing": "write piper.strategies.one_f_one_b(pp=2, microbatches=8), or a list of directives",
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_strategy_that_is_a_text_gets_its_builder(name: str) -> None:
    assert named(name, BUILDERS) == GIVEN[name]


def test_a_configuration_of_another_system_gets_its_builder() -> None:
    with pytest.raises(PiperError) as error:
        given_strategy({"zero_optimization": {"stage": 3}, "train_batch_size": 8})

    fix = "write piper.strategies.one_f_one_b(pp=1, dp=N, zero=3, microbatches=1)"
    assert str(error.value).endswith(f"as other systems are configured\n  fix: {fix}")


def test_strategies_are_copied_and_pickled() -> None:
    one = Strategy([ONE])

    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert not hasattr(one, "append")
