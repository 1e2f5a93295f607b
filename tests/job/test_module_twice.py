"""One module under several names, as ALBERT and universal transformers have."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.strategies import one_f_one_b

WIDTH = 6
ADAM = partial(torch.optim.AdamW, lr=0.05)
DRAW = torch.Generator().manual_seed(1)
BATCHES = [tuple(torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=DRAW)) for _ in range(3)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(self.norm(x)))


class Twice(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        match how:
            case "all":
                self.layers = nn.ModuleList([Block()] * 4)
            case "replaced":
                self.layers[2] = self.layers[0]
            case "another name":
                self.other = self.layers[1]
            case "a part":
                self.layers[3].a = self.layers[0].a
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.other(x) if hasattr(self, "other") else x


FORMS = ("all", "replaced", "another name", "a part")
STRATEGIES = {
    "plain": None,
    "stages": one_f_one_b(pp=2, microbatches=4),
    "zero": one_f_one_b(pp=1, dp=2, zero=3, microbatches=2),
}
CASES = [(form, name) for form in FORMS for name in STRATEGIES]


@one_of(2)
@pytest.mark.parametrize(("form", "name"), every(4, CASES, [" ".join(one) for one in CASES]))
def test_a_module_with_two_names_is_trained_as_one(form: str, name: str) -> None:
    model = Twice(form)
    losses = plain_losses(ADAM(model.parameters()), BATCHES, lambda x, y: F.mse_loss(model(x), y))

    found = rehearse(Twice(form), F.mse_loss, STRATEGIES[name], BATCHES, optimizer=ADAM)

    assert found.losses == pytest.approx(losses, rel=1e-10)
    for key, wanted in model.named_parameters():
        torch.testing.assert_close(found.parameters[key], wanted.detach(), rtol=1e-9, atol=1e-11)
