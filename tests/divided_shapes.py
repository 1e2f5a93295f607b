"""A language model under tp, in a process of a test, on batches of several shapes."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1)
SHAPES = [(8, 32), (2, 4), (64, 8), (2, 2)]  # for some, other divisions take less time


class LanguageModel(nn.Module):
    def __init__(self, words: int, width: int, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, width)
        self.layer = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.last = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head(x + self.last(self.layer(x)))


def loss_of(found: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(found.flatten(0, 1), labels.flatten())


def train(rank: int, words: int, width: int, tied: bool) -> list[float]:
    """How far losses, evaluations and predictions are from those of plain PyTorch."""
    model, draw = LanguageModel(words, width, tied), torch.Generator().manual_seed(0)
    plain = copy.deepcopy(model)
    optimizer, found = SGD(plain.parameters()), []
    batches = [torch.randint(words, (2, *shape), generator=draw).unbind() for shape in SHAPES]
    strategy = one_f_one_b(pp=1, tp=2, microbatches=2)
    trainer = piper.Trainer(
        model, loss_of, strategy, example=batches[0], optimizer=SGD, device="cpu"
    )  # fmt: skip
    for tokens, labels in batches:
        held_out, predicted = trainer.evaluate([(tokens, labels)]).loss, trainer.predict(tokens)
        optimizer.zero_grad()
        wanted = plain(tokens)
        loss = loss_of(wanted, labels)
        loss.backward()
        optimizer.step()
        found += [held_out - loss.item(), trainer.step(tokens, labels).loss - loss.item()]
        if predicted is not None:
            found.append((predicted - wanted).abs().max().item())
    trainer.close()
    return found
