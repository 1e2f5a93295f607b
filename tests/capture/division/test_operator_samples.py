"""Every rule, with arguments and numbers that a rule may forget."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from capture.division.draws import index, trial, x
from capture.division.samples import sampled, samples
from capture.division.trials import Trial, run_option, run_whole
from draws import SOAK, drawn

import piper.models.grouped  # noqa: F401 its operators have rules
from piper.capture.graphs.division.calls import Call, Option
from piper.capture.graphs.division.rules import RULES, options_of
from piper.ir.placement.placements import Cut, Partial, Replicated

aten = torch.ops.aten
FEW = 48  # one sample of so many is run by default
WAYS = (2, 3, 4) if SOAK else (2,)
SEEDS = range(3) if SOAK else [0]


def is_divided(option: Option) -> bool:
    return any(isinstance(one, Cut | Partial) for one in (*option.inputs, option.output))


def must_be_finite(call: Call, option: Option) -> bool:
    """A part of a sum times an infinite factor is infinite, with either sign, and their sum is NaN
    where that of a whole is infinite. And attention may or may not read what a mask hides."""
    both = {Partial(), Replicated()} <= set(option.inputs)
    return both or call.packet is aten.scaled_dot_product_attention


def is_computed(call: Call) -> bool:
    """Whether torch itself takes these numbers, and has a derivative."""
    try:
        run_whole(call)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def test_every_sample_has_options_that_fit() -> None:
    for line in samples():
        call = sampled(line, hostile=False).call(2)
        assert options_of(call)


@drawn
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(FEW) if SOAK else [0])
def test_devices_together_give_what_one_gives(first: int) -> None:
    torch.manual_seed(0)

    for line in samples()[first::FEW]:
        for ways, seed in product(WAYS, SEEDS):
            calls = [sampled(line, hostile, seed).call(ways) for hostile in (False, True)]
            computed = [is_computed(call) for call in calls]
            for options in zip(*map(options_of, calls), strict=True):
                for k in {0, int(not must_be_finite(calls[1], options[1]))}:
                    if computed[k] and is_divided(options[k]):
                        run_option(calls[k], options[k])


ONLY_WHOLE_SUMS = [
    trial(aten.div.Tensor, x(12, 5), 0.0),  # inf - inf
    trial(aten.div.Tensor, x(12, 5), index(2, 12, 5)),
    trial(aten.mul.Tensor, x(12, 5), torch.inf),
    trial(aten.sum.dim_IntList, x(12, 5), [0], dtype=torch.int64),  # each part would be rounded
    trial(aten.cumsum.default, x(12, 5), 1, dtype=torch.float32),
]


@pytest.mark.parametrize("one", ONLY_WHOLE_SUMS, ids=lambda one: str(one.target))
def test_what_parts_of_a_sum_cannot_give_reads_whole_ones(one: Trial) -> None:
    assert not any(Partial() in option.inputs for option in options_of(one.call(2)))


def test_samples_are_of_nearly_every_rule() -> None:
    names = {line.split('"')[1].rpartition(".")[0] for line in samples()}

    assert len({str(one) for one in RULES} - names) < 42
