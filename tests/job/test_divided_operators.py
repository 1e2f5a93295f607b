"""Models that use more operators than a Llama are divided, without messages that need not be."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

from piper import annotate, rehearse, strategies

SGD = partial(torch.optim.SGD, lr=0.1)
HEADS, SIZE = 4, 4


class Attention(nn.Module):
    """With normalized queries and keys, complex rotations, and key heads that are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.pair = nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)
        self.register_buffer("turns", torch.linspace(0, 3, 16).view(8, 2), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (2, 2)))
        turned = turned * torch.polar(torch.ones_like(self.turns), self.turns)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q = functional.normalize(self.query(x).unflatten(-1, (HEADS, SIZE)), dim=-1)
        k, v = self.pair(x).unflatten(-1, (HEADS, SIZE)).chunk(2, 2)
        k = functional.normalize(k, dim=-1)
        q, k = self.rotated(q), self.rotated(k)
        k, v = (one.repeat_interleave(2, 2) for one in (k, v))
        scores = torch.einsum("blhd,bmhd->bhlm", q, k).tril()
        mixed = torch.einsum("bhlm,bmhd->blhd", functional.softmax(scores, -1), v)
        return self.out(mixed.flatten(2))


class Pictures(nn.Module):
    """Patches by convolutions, then attention, a gated product, and a head for every patch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(2, 8, 3, padding=1), nn.Conv1d(8, 16, 2, 2)
        self.depth = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.norm, self.mixed = nn.GroupNorm(4, 8), Attention()
        self.gated, self.down = nn.Linear(16, 64), nn.Linear(32, 16)
        self.head = nn.Linear(16, 12)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("L"):
            x = functional.hardswish(self.norm(self.first(x)))
            x = self.second(x)
            x = (x + self.depth(x)).transpose(1, 2)
        with annotate("L"):
            x = x + self.mixed(x)
        with annotate("L"):
            best, place = functional.glu(self.gated(x)).topk(16)
            gated = x.new_zeros(*x.shape[:2], 32).scatter(-1, place, best)
            x = x + self.down(gated / gated.std(-1, keepdim=True))
            return self.head(x).transpose(1, 2)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, label_smoothing=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    pictures = partial(torch.randn, 4, 2, 16, dtype=torch.float64, generator=draw)
    return [(pictures(), torch.randint(0, 12, (4, 8), generator=draw)) for _ in range(2)]


HOW = [{"tp": 2}, {"cp": 2}, {"tp": 4}, {"tp": 2, "cp": 2}]


@pytest.mark.soak  # each rule has its trial
@pytest.mark.parametrize("how", HOW, ids=str)
def test_other_operators_are_divided_exactly(how: dict[str, Any]) -> None:
    model = Pictures()
    reference = copy.deepcopy(model)
    wanted = plain_losses(
        SGD(reference.parameters()), batches(), lambda x, y: loss_fn(reference(x), y)
    )

    strategy = strategies.one_f_one_b(pp=1, microbatches=2, **how)
    found = rehearse(model, loss_fn, strategy, batches(), optimizer=SGD)

    assert found.losses == pytest.approx(wanted, rel=1e-12)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(
            found.parameters[name], parameter.detach(), rtol=1e-11, atol=1e-12
        )
