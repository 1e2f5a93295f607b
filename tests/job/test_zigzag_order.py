"""Tokens in zigzag order: what must see all of them in their order, does."""

from __future__ import annotations

import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

from piper import annotate, rehearse, strategies

TOKENS, WIDTH, HEADS = 8, 8, 2


class Mixed(nn.Module):
    """Attention, then a product along the tokens, for which they are gathered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.along = nn.Linear(TOKENS, TOKENS)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            parts = self.inside(x).unflatten(2, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
            seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + seen.transpose(1, 2).flatten(2)
        with annotate("PP"):
            mixed = torch.tanh(self.along(x.transpose(1, 2)).transpose(1, 2))
            return self.out(x + mixed + x.cumsum(1))


def batches() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randn(
        3, 2, 4, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    return [(x, y) for x, y in drawn]


def sgd(parameters: object) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def test_a_zigzag_of_four_devices_is_gathered_in_order() -> None:
    model = Mixed()
    optimizer = sgd(model.parameters())
    losses = plain_losses(optimizer, batches(), lambda x, y: functional.mse_loss(model(x), y))
    strategy = strategies.zb_h1(pp=2, microbatches=2, cp=4, cp_attention="zigzag")

    found = rehearse(Mixed(), functional.mse_loss, strategy, batches(), optimizer=sgd)

    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(losses), rtol=1e-12, atol=0)
    for name, wanted in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], wanted.detach(), rtol=1e-10, atol=1e-13)
