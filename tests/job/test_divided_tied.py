"""An embedding that is the head too, cut over devices, with its two uses in different stages."""

from __future__ import annotations

from copy import deepcopy
from functools import cache, partial

import pytest
import torch
from dense_net import PARTS, SGD, Net, batches, loss_fn
from plain_loop import plain_losses

from piper import Strategy, rehearse, strategies

CASES = {
    "tp": partial(strategies.one_f_one_b, pp=2, microbatches=PARTS, tp=2),
    "tp, dp": partial(strategies.zb_h1, pp=2, microbatches=2, dp=2, tp=2),
    "tp, more devices for the head": partial(
        strategies.one_f_one_b, pp=2, microbatches=2, dp=[1, 2], tp=2
    ),
    "tp, fewer devices for the head": partial(
        strategies.one_f_one_b, pp=2, microbatches=2, dp=[2, 1], tp=2
    ),
    "tp, cp, dp": partial(strategies.zb_h1, pp=2, microbatches=2, dp=2, tp=2, cp=2),
}


def tied() -> Net:
    torch.manual_seed(1)
    model = Net().double()
    model.head.weight = model.embed.weight
    return model


@cache
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = deepcopy(tied())
    optimizer = SGD(model.parameters())
    losses = plain_losses(
        optimizer, batches(), lambda tokens, labels: loss_fn(model(tokens), labels)
    )
    return losses, {name: one.detach() for name, one in model.named_parameters()}


def agree(strategy: Strategy) -> None:
    found = rehearse(tied(), loss_fn, strategy, batches(), optimizer=SGD)

    losses, parameters = plain()
    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, wanted in parameters.items():
        torch.testing.assert_close(found.parameters[name], wanted, rtol=1e-11, atol=1e-13)


def test_a_tied_embedding_is_cut() -> None:
    agree(CASES["tp"](zero=0))


@pytest.mark.soak
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("name", CASES)
def test_a_tied_embedding_is_cut_with_everything(name: str, zero: int) -> None:
    agree(CASES[name](zero=zero))
