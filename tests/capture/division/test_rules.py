"""Each rule by itself. A rule without a trial fails the suite."""

from __future__ import annotations

import operator
from itertools import product
from typing import Any

import pytest
import torch
from capture.division.draws import flags, index, trial, with_padding, x
from capture.division.more_trials import MORE
from capture.division.trials import Trial, local_module, piece, run_option
from draws import SOAK, drawn, one_of
from torch import Tensor

import piper.models.grouped  # noqa: F401 its operators have rules
from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Option
from piper.capture.graphs.division.rules import RULES, options_of
from piper.ir.placement.placements import Cut, Invariant, Partial, Replicated

aten = torch.ops.aten
RANDOM = torch.tensor([3, 1, 1, 2])
UNARY = [
    aten.abs.default, aten.cos.default, aten.elu.default, aten.erf.default, aten.exp.default,
    aten.gelu.default, aten.hardtanh.default, aten.isinf.default, aten.isnan.default,
    aten.leaky_relu.default, aten.log.default, aten.log1p.default, aten.mish.default,
    aten.reciprocal.default, aten.relu.default, aten.rsqrt.default, aten.sigmoid.default,
    aten.sign.default, aten.silu.default, aten.sin.default, aten.softplus.default,
    aten.sqrt.default, aten.square.default, aten.tanh.default, aten.zeros_like.default,
    aten.ones_like.default, aten.neg.default, aten.clone.default, aten.alias.default,
    aten.detach.default, aten.contiguous.default, aten.lift_fresh_copy.default,
]  # fmt: skip
TRIALS = [
    *(trial(target, x(12, 5)) for target in UNARY),
    trial(aten._to_copy.default, x(12, 5), dtype=torch.float64),
    trial(aten.to.dtype, x(12, 5), torch.float64),
    trial(aten.type_as.default, x(12, 5), x(1)),
    trial(aten.clamp.default, x(12, 5), 0.3, 0.6),
    trial(aten.clamp_min.default, x(12, 5), 0.5),
    trial(aten.clamp_max.default, x(12, 5), 0.5),
    trial(aten.pow.Tensor_Scalar, x(12, 5), 3),
    trial(aten.rsub.Scalar, x(12, 5), 3),
    *(
        trial(target, x(12, 5), 0.5)
        for target in (
            aten.eq.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar,
            aten.ne.Scalar,
        )
    ),
    trial(aten.logical_not.default, flags(12, 5)),
    trial(aten.logical_and.default, flags(12, 5), flags(5)),
    trial(aten.logical_or.default, flags(12, 5), flags(5)),
    trial(aten.masked_fill.Scalar, x(12, 5), flags(12, 1), 0.0),
    trial(aten.maximum.default, x(12, 5), x(5)),
    trial(aten.minimum.default, x(12, 5), x(12, 1)),
    trial(aten.add.Tensor, x(5, 24), x(24), blocks=(1, 2)),
    trial(aten.add.Tensor, x(5, 12), 1.0),
    trial(aten.sub.Tensor, x(5, 12), x(5, 1), alpha=2),
    trial(aten.mul.Tensor, x(5, 12), x(12)),
    trial(aten.mul.Tensor, x(5, 12), 0.5),
    trial(aten.mul.Tensor, *[x(5, 12)] * 2),
    trial(aten.div.Tensor, x(5, 12), x()),
    trial(aten.div.Tensor, x(5, 12), 3),
    trial(aten.where.self, flags(12, 1), x(12, 5), x(5)),
    trial(torch.ops.piper.dropout.default, x(12, 3, 24), RANDOM, 1, 0.4, blocks=(1, 2)),
    trial(torch.ops.piper.dropout.default, x(12, 3, 24), RANDOM, 1, 0.4, [1, 1], blocks=(1, 2)),
    trial(torch.ops.piper.dropout.default, x(12, 3, 24), RANDOM, 1, 0.4, [2, 1], blocks=(1, 2)),
    trial(torch.ops.piper.dropout.default, x(12, 3, 24), RANDOM, 1, 0.4, [2, 4], blocks=(1, 2)),
    trial(torch.ops.piper.dropout.default, x(12, 3, 24), RANDOM, 1, 0.4, [0, 3], blocks=(1, 2)),
    trial(aten.linear.default, x(2, 12, 24), x(24, 24), blocks=(1, 2)),
    trial(torch.ops.piper.scaled_linear.default, x(3, 12, 16), x(32, 16)),
    trial(aten.matmul.default, x(5, 12, 24), x(24, 12), blocks=(1, 2)),
    trial(aten.matmul.default, x(12, 12, 4, 3), x(12, 12, 3, 12)),
    trial(aten.matmul.default, x(1, 12, 12, 24), x(12, 12, 24, 5)),
    trial(aten.mm.default, x(12, 24), x(24, 12)),
    trial(aten.bmm.default, x(24, 5, 12), x(24, 12, 5), blocks=(1, 2)),
    trial(torch.ops.piper.grouped_mm.default, x(9, 12), x(3, 12, 24), torch.tensor([4, 0, 5]),
          blocks=(1, 2)),
    trial(torch.ops.piper.permute_rows.default, x(6, 12), *[torch.tensor([3, 4, 5, 0, 1, 2])] * 2),
    trial(aten.embedding.default, x(24, 12), index(24, 5, 12)),
    trial(aten.embedding.default, x(24, 12), with_padding(3, index(24, 12, 5)), 3, blocks=(1, 3)),
    trial(aten.embedding.default, x(24, 12), index(24, 12), -1, True),
    trial(aten.embedding.default, x(24, 12), with_padding(20, index(24, 12, 2)), 20),
    trial(aten.gather.default, x(12, 24), 1, index(24, 12, 1)),
    trial(aten.gather.default, x(12, 24, 12), -2, index(24, 12, 3, 12)),
    trial(aten.index_select.default, x(12, 7, 12), 1, index(7, 24)),
    trial(aten.rms_norm.default, x(5, 12, 7), [7], x(7), 1e-5),
    trial(aten.layer_norm.default, x(12, 12, 7), [7], x(7), x(7), 1e-5),
    trial(aten.softmax.int, x(12, 12, 5), -1),
    trial(aten._softmax.default, x(12, 5), 1, False),
    trial(aten.log_softmax.int, x(12, 5), 1),
    trial(aten._log_softmax.default, x(12, 5), 1, False),
    trial(aten.amax.default, x(12, 5, 12), [1]),
    trial(aten.amin.default, x(12, 5, 12), [1], True),
    trial(aten.logsumexp.default, x(12, 12, 5), [-1]),
    trial(torch.ops.piper.log_sum.default, x(12, 12, 5), -1),
    trial(aten.var.correction, x(12, 5), [1], correction=0, keepdim=True),
    trial(aten.sum.default, x(12, 12)),
    trial(aten.sum.dim_IntList, x(12, 5, 12), [0, 1]),
    trial(aten.mean.default, x(12, 12)),
    trial(aten.mean.dim, x(12, 5, 12), [-1], True),
    trial(aten.view.default, x(3, 12, 24), [36, 24], blocks=(1, 3)),
    trial(aten.reshape.default, x(3, 4, 36), [3, 4, 3, 12], blocks=(1, 3)),
    trial(aten._unsafe_view.default, x(12, 12), [144]),
    trial(aten.view.dtype, x(12, 12), torch.float64),
    trial(aten.flatten.using_ints, x(2, 12, 12), 0, 1, blocks=(1, 2)),
    trial(aten.unflatten.int, x(5, 24), -1, [12, 2]),
    trial(aten.unsqueeze.default, x(12, 5), 1),
    trial(aten.squeeze.dim, x(12, 1, 12), 1),
    trial(aten.expand.default, x(12, 1, 12), [2, 12, 3, 12]),
    trial(aten.transpose.int, x(12, 5, 24), 0, -1),
    trial(aten.swapaxes.default, x(12, 5, 24), 0, 1),
    trial(aten.movedim.int, x(12, 5, 24), 0, -1),
    trial(aten.permute.default, x(12, 5, 24), [2, 0, 1], blocks=(1, 2)),
    trial(aten.t.default, x(12, 24)),
    trial(aten.select.int, x(12, 3, 12), 1, 2),
    trial(aten.slice.Tensor, x(12, 36), 1, 12, 36, blocks=(1, 3)),
    trial(aten.slice.Tensor, x(12, 24), 1, 0, 24),
    trial(aten.slice.Tensor, x(12, 24), -1, 0, 24, 2),
    trial(aten.split.Tensor, x(12, 36), 12, 1, blocks=(1, 3)),
    trial(aten.chunk.default, x(12, 24), 2, -1, blocks=(1, 2)),
    trial(aten.split_with_sizes.default, x(5, 48), [24, 12, 12], -1, blocks=(1, 4)),
    trial(aten.unbind.int, x(12, 3, 12), 1, blocks=(1, 3)),
    trial(aten.cat.default, [x(12, 12), x(12, 12)], -1),
    trial(aten.cat.default, [x(5, 12), x(7, 12)]),
    trial(aten.stack.default, [x(12, 12), x(12, 12)], 1),
    trial(aten.scaled_dot_product_attention.default, *(x(1, 12, 12, 2) for _ in range(3)),
          is_causal=True),
    trial(aten.scaled_dot_product_attention.default, x(1, 24, 12, 2), x(1, 12, 12, 2),
          x(1, 12, 12, 2), None, 0.0, True, enable_gqa=True, blocks=(1, 2)),
    trial(aten.scaled_dot_product_attention.default, x(12, 2, 12, 2), x(12, 2, 12, 2),
          x(12, 2, 12, 2), x(12, 1, 12, 12)),
    trial(torch.ops.piper.attend.default, x(12, 24, 3, 2), x(12, 12, 4, 2), x(12, 12, 4, 3),
          flags(12, 1, 3, 4), False, 0.7, blocks=(1, 2)),
    trial(torch.ops.piper.attend_last.default, x(2, 24, 3, 2), x(2, 12, 4, 5), x(2, 12, 4, 5),
          flags(2, 1, 3, 4), None, 2, 0.7, blocks=(1, 2)),
    trial(torch.ops.piper.attend_and_pass.default, x(2, 12, 4, 2), x(2, 12, 4, 5), x(2, 12, 4, 5),
          None, torch.tensor(True), 2, 0.7),
    trial(torch.ops.piper.largest_scores.default, index(9, 12, 12, 12, 5)),
    trial(torch.ops.piper.attend.default, x(1, 12, 4, 2), x(1, 12, 4, 2), x(1, 12, 4, 2), None,
          True, 0.7),
    *MORE,
]  # fmt: skip


def name(one: Trial) -> str:
    return str(one.target)


@one_of(8)
@drawn
@pytest.mark.parametrize("one", TRIALS, ids=name)
def test_devices_together_give_what_one_gives(one: Trial) -> None:
    if one.target is torch.ops.aten.aminmax.default and torch.__version__ < "2.13":
        pytest.skip("PyTorch has no derivative of it yet")
    torch.manual_seed(0)

    for ways, zigzag in product((2, 3, 4), (False, True)) if SOAK else ((3, False), (2, True)):
        call = one.call(ways, zigzag)
        for option in options_of(call):
            run_option(call, option)


def is_divided(option: Option) -> bool:
    return any(isinstance(one, Cut | Partial) for one in (*option.inputs, option.output))


def test_every_rule_has_a_trial_with_more_than_whole_tensors() -> None:
    calls = [one.call(2) for one in TRIALS]
    tried = {call.packet for call in calls if any(map(is_divided, options_of(call)))}

    # The first is tried with operators that split, the others in files of their own.
    own = torch.ops.piper
    elsewhere = {own.convert, own.ring_block, own.ring_passing, own.ring_sum, own.ring_result}
    assert set(RULES) - tried == {operator.getitem, *elsewhere}


S, P, R = Cut, Partial(), Replicated()
MISTAKES = {
    "a sum that forgets the parts of others": (
        trial(aten.linear.default, x(5, 12), x(7, 12)), Option((S(1), S(1)), R)),
    "a product of two sums": (trial(aten.mul.Tensor, x(12), x(12)), Option((P, P), P)),
    "a function that is not linear": (trial(aten.exp.default, x(12)), Option((P,), P)),
    "a gradient that is a part, taken as whole": (
        trial(aten.mul.Tensor, x(12, 5), x(5)), Option((S(0), Invariant()), S(0))),
    "the wrong blocks": (
        trial(aten.reshape.default, x(2, 12, 5), [24, 5]), Option((S(1),), S(0))),
    "a number that every device adds": (trial(aten.add.Tensor, x(12), 1.0), Option((P,), P)),
    "a softmax along the cut": (trial(aten.softmax.int, x(5, 12), 1), Option((S(1),), S(1))),
    "keys of one device": (
        trial(aten.scaled_dot_product_attention.default, *(x(1, 2, 12, 2) for _ in range(3))),
        Option((S(2), S(2), S(2)), S(2))),
    "a gradient that is whole, taken as a part": (
        trial(aten.add.Tensor, x(12), x(12)), Option((P, R), P)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_rule_is_found(mistake: str) -> None:
    one, option = MISTAKES[mistake]

    with pytest.raises(AssertionError):
        run_option(one.call(2), option)


LOOKUPS = (
    trial(aten.embedding.default, x(24, 12), index(24, 12)),
    trial(aten.embedding.default, x(24, 12), index(24, 12), 3),
    trial(aten.gather.default, x(12, 24), 1, index(24, 12, 1)),
    trial(aten.index_select.default, x(7, 24), 1, index(24, 12)),
)


@pytest.mark.parametrize("wrong", [24, 25, 1000, -1, -24])
@pytest.mark.parametrize("one", LOOKUPS, ids=name)
def test_an_index_that_no_device_has_fails_as_in_one_process(one: Trial, wrong: int) -> None:
    fails = pytest.raises((IndexError, RuntimeError), match=r"out of .*(range|bounds)")

    for ways in (2, 4):
        call = one.call(ways)
        for option in options_of(call):
            module = local_module(call, option)
            place = next(k for k, node in enumerate(call.operands) if not is_float(node))
            tensors = [value(node).clone() for node in call.operands]
            tensors[place].view(-1)[5] = wrong
            every = [
                [piece(t, p, ways, rank) for t, p in zip(tensors, option.inputs, strict=True)]
                for rank in range(ways)
            ]
            with fails:
                one.target(*tensors_in_order(one, tensors))
            with fails:
                for rank, pieces in enumerate(every):
                    module(*pieces, torch.tensor(rank))


@pytest.mark.parametrize("one", LOOKUPS, ids=name)
def test_an_infinite_value_of_another_row_is_not_found(one: Trial) -> None:
    given, *rest = one.args
    every_third = torch.arange(given.numel()).view(given.shape) % 3 == 0  # the first of each device
    masked = given.masked_fill(every_third, -torch.inf)

    for ways in (2, 3, 4):
        call = Trial(one.target, (masked, *rest), one.kwargs, one.blocks).call(ways)
        for option in options_of(call):
            if Partial() not in option.inputs:  # parts of an infinite sum may be anything
                run_option(call, option)


def is_float(node: torch.fx.Node) -> bool:
    return value(node).is_floating_point()


def tensors_in_order(one: Trial, tensors: list[Tensor]) -> list[Any]:
    """The arguments of a trial, with other tensors."""
    given = iter(tensors)
    return [next(given) if isinstance(arg, Tensor) else arg for arg in one.args]
