"""A small model without annotations for strategies, divided and compared with plain PyTorch.

In a file of its own: all tests that divide it share its captures.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from piper import Place, Strategy, annotate, strategies, where
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.rehearsal import Rehearsal, rehearsed

PARTS, ROWS, LENGTH, WIDTH, VOCAB, MAX_NORM = 4, 2, 4, 8, 12, 0.5
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    """Norm, causal attention with fused q, k and v, norm, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(one) for one in self.fused(self.before(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.silu(self.up(self.between(x))))


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], 4, -1).transpose(1, 2)


class Net(nn.Module):
    """An embedding, two blocks, a head; not edited for any strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            with annotate("L"):
                x = layer(x)
        return self.head(x)


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@cache
def job() -> Job:
    """One for all tests, which share its captures."""
    torch.manual_seed(1)
    one = Strategy([Place(where(), [0])])
    return Job(Net().double(), loss_fn, one, Options(optimizer=SGD, max_norm=MAX_NORM))


@cache
def batches() -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    draw = torch.Generator().manual_seed(2)
    rand = partial(torch.randint, 0, VOCAB, (PARTS * ROWS, LENGTH), generator=draw)
    return tuple((rand(), rand()) for _ in range(3))


@cache
def plain() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and norms of every step, and the parameters after the last."""
    model = deepcopy(job().model)
    optimizer, losses, norms = SGD(model.parameters()), [], []
    for tokens, labels in batches():
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), labels)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def run(strategy: Strategy) -> Rehearsal:
    return rehearsed(job().under(strategy), [Batch.of(batch) for batch in batches()])


def agree(found: Rehearsal) -> None:
    losses, norms, parameters = plain()
    assert found.losses == pytest.approx(losses, rel=1e-12)
    assert found.grad_norms == pytest.approx(norms, rel=1e-12)
    for name, wanted in parameters.items():
        torch.testing.assert_close(found.parameters[name], wanted, rtol=1e-12, atol=1e-13)


STRATEGIES = {
    "gpipe": lambda **o: strategies.gpipe(pp=2, microbatches=4, **o),
    "1f1b": lambda **o: strategies.one_f_one_b(pp=2, dp=2, microbatches=2, zero=3, **o),
    "zb-h1": lambda **o: strategies.zb_h1(pp=2, dp=2, microbatches=2, zero=1, **o),
    "interleaved": lambda **o: strategies.interleaved_zb(pp=1, microbatches=4, zero=2, **o),
    "zbv": lambda **o: strategies.zbv(pp=1, dp=2, microbatches=2, zero=2, **o),
    "dualpipev": lambda **o: strategies.dualpipev(pp=1, dp=2, microbatches=2, zero=1, **o),
    "dualpipe": lambda **o: strategies.dualpipe(pp=2, microbatches=2, zero=3, **o),
    "replicas": lambda **o: strategies.one_f_one_b(pp=1, dp=4, microbatches=1, zero=3, **o),
}
