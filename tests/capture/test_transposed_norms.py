"""Norms whose output is transposed: their kernels read gradients in the layout of their input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional

from piper import rehearse

SGD = partial(torch.optim.SGD, lr=1.0)
FORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "turned back": lambda norm, x: norm(x.mT).mT,
    "an attention block": lambda norm, x: norm(x.mT.reshape(-1, 6, 7)).transpose(1, 2),
    "pixels": lambda norm, x: norm(x.mT[..., None]).flatten(2).permute(0, 2, 1),
    "before": lambda norm, x: norm(x.mT).exp().mT,
    "channels last": lambda norm, x: norm(
        x.mT[..., None].expand(-1, -1, -1, 2).contiguous(memory_format=torch.channels_last)
    ).mean(-1).mT,
    "as it is": lambda norm, x: norm(x.mT),
}  # fmt: skip
NORMS: dict[str, Callable[[], nn.Module]] = {
    "group": lambda: nn.GroupNorm(3, 6),
    "batch": lambda: nn.BatchNorm1d(6),
}
CASES = [("group", form) for form in FORMS] + [("batch", "turned back")]


class Net(nn.Module):
    def __init__(self, norm: str, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.form = nn.Linear(6, 6), NORMS[norm](), FORMS[form]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.norm, self.first(x))


@one_of(6)
@pytest.mark.parametrize(("norm", "form"), CASES)
def test_they_have_the_gradients_of_plain_pytorch(norm: str, form: str) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, 7, 6, generator=draw).double()
    model = Net(norm, form)
    wanted = torch.randn(model(x).shape, generator=draw).double()
    model = Net(norm, form)
    optimizer = SGD(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        functional.mse_loss(model(x), wanted).backward()
        optimizer.step()

    found = rehearse(Net(norm, form), functional.mse_loss, None, [(x, wanted)] * 2, optimizer=SGD)

    for name, parameter in model.named_parameters():
        given = found.parameters[name], parameter.detach()
        torch.testing.assert_close(*given, rtol=1e-9, atol=1e-11)
