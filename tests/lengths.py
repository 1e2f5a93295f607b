"""Replicas whose batches are padded to their own longest row."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper import Strategy, Trainer, annotate
from piper.errors import PiperError
from piper.job.compile.division import feeds_of

SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
STEPS = ((5, 13), (13, 5), (6, 6), (5, 13))  # the longest row of each replica
ROWS, WORDS = 4, 11  # of each replica
NOTHING = -100
LAYERS = 3  # what is free for gathered ones depends on lengths


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


class Reader(nn.Module):
    """Every position sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(WORDS, 8)
        self.inner = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(8, WORDS)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.words(tokens)
            places = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(1)
            x = x.cumsum(1) / places
        for one in self.inner:
            with annotate("PP"):
                x = x + one(x)
        with annotate("PP"):
            return self.head(x)


def label_loss(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=NOTHING)


def errors(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of each position, and a mask of those that count."""
    found = functional.cross_entropy(output.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return found, (labels != NOTHING).double()


def row_sums(output: Tensor, labels: Tensor) -> Tensor:
    """The same as `label_loss`: rows are averaged, positions are added up."""
    e, m = errors(output, labels)
    return (e * m).sum(1).mean() / m.sum(1).mean()


def means(output: Tensor, labels: Tensor) -> Tensor:
    """The same: rows and positions are averaged."""
    e, m = errors(output, labels)
    return (e * m).mean() / m.mean()


RATIOS = {"row sums": row_sums, "means": means}


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    return (output.logsumexp(-1) * (labels + 1)).mean()


def padded(step: int, replica: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows of different lengths, padded to the longest of the replica, or to a length."""
    draw = torch.Generator().manual_seed(10 * step + replica)
    longest = STEPS[step][replica]
    tokens = torch.randint(0, WORDS, (ROWS, longest), generator=draw)
    labels = torch.randint(0, WORDS, (ROWS, longest), generator=draw)
    for row in range(1, ROWS):
        labels[row, longest - row :] = NOTHING
    more = (0, (length or longest) - longest)
    return functional.pad(tokens, more), functional.pad(labels, more, value=NOTHING)


def train_apart(rank: int, text: str, loss: str = "labels") -> Any:
    """Losses and sizes of steps, then of an evaluation, and parameters; or what is said.

    Every process gives its own example.
    """
    strategy = Strategy.from_json(text)
    replica = feeds_of(strategy).feed(rank)
    weight = {"loss_weight": lambda tokens, labels: labels.numel()} if loss == "weighted" else {}
    given: dict[str, Any] = {"example": padded(0, replica), "optimizer": SGD, "max_norm": 0.5}
    function = RATIOS.get(loss, label_loss if loss == "labels" else mean_loss)
    trainer = Trainer(Reader(), function, strategy, **given, **weight)
    try:
        found = [trainer.step(*padded(k, replica)) for k in range(len(STEPS))]
        read = [(one.loss, one.samples, one.tokens) for one in found]
        held_out = trainer.evaluate([padded(k, replica) for k in range(len(STEPS))])
        read.append((held_out.loss, held_out.samples, held_out.tokens))
        return read, trainer.state_dict()
    except PiperError as error:
        return str(error)
    finally:
        trainer.close()
