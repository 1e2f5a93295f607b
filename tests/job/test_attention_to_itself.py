"""Operators that read one value several times, divided: attention of `h` to itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional

from piper import rehearse
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SHAPE = 4, 6, 8


def heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (2, 4)).transpose(1, 2)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda h: functional.scaled_dot_product_attention(h, h, h),
    "of heads": lambda h: (
        functional.scaled_dot_product_attention(*[heads(h)] * 3).transpose(1, 2).flatten(2)
    ),
    "keys as values": lambda h: functional.scaled_dot_product_attention(h.tanh(), h, h),
    "a square": lambda h: h * h + h,
    "a product": lambda h: torch.bmm(h, h.mT) @ h,
    "sums": lambda h: torch.einsum("bsd,btd,btd->bsd", h, h, h),
}


class Net(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.form = FORMS[form]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.form(self.first(x)))


@one_of(6)
@pytest.mark.parametrize("ways", ["tp", "cp"])
@pytest.mark.parametrize("form", FORMS)
def test_it_trains_as_plain_pytorch(form: str, ways: str) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(2, *SHAPE, generator=draw).double()) for _ in range(3)]
    model = Net(form)
    optimizer, losses = SGD(model.parameters()), []
    for x, wanted in batches:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    strategy = one_f_one_b(pp=1, microbatches=2, **{ways: 2})
    found = rehearse(Net(form), functional.mse_loss, strategy, batches, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, parameter in model.named_parameters():
        given = found.parameters[name], parameter.detach()
        torch.testing.assert_close(*given, rtol=1e-10, atol=1e-12)
