"""Code as researchers write it, under random strategies: trained as plain PyTorch, or refused.

`python tests/job/test_model_code.py 0 128` prints the outcome of each, and a table.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "scripts")]

import torch
from draws import drawn, draws
from model_code import LOSSES, MODELS, C, D, T
from torch import Tensor, nn

from piper import Place, Remat, Replicate, Split, rehearse, where
from piper.directives import Directive
from piper.errors import PiperError
from piper.strategies import BUILDERS

STEPS = 3
INTERACTING = ("BatchStatistics", "Queue", "Pointer", "Clusters", "Spectral")  # rows or calls do
MEANS = ("entropy", "smoothed", "focal", "several", "ranked", "by_tokens")
OPTIMIZERS = (
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
    partial(torch.optim.RMSprop, lr=1e-2, eps=1e-3),
    partial(torch.optim.Adagrad, lr=1e-2, eps=1e-3),
    partial(torch.optim.Adam, lr=1e-2, eps=1e-4, amsgrad=True),
)
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """A model, a loss, a strategy and an optimizer."""

    seed: int
    model: str
    loss: str
    optimizer: Any
    strategy: list[Directive]
    replicas: int
    sizes: list[int]  # of the microbatches of a replica, in rows

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return MODELS[self.model]().double().train()

    @property
    def batches(self) -> Batches:
        draw, rows = torch.Generator().manual_seed(self.seed), self.replicas * sum(self.sizes)
        one = partial(torch.randn, rows, T, D, generator=draw, dtype=torch.float64)
        labels = partial(torch.randint, 0, C, (rows, T), generator=draw)
        return [(one(), labels()) for _ in range(STEPS)]

    @property
    def pieces(self) -> list[list[int]]:
        """The rows that the model sees at once, for each replica."""
        whole = self.replicas * sum(self.sizes)
        return [self.sizes] * self.replicas if self.model in INTERACTING else [[whole]]


def strategy_of(rng: random.Random) -> tuple[list[Directive], int, list[int]]:
    """A strategy, its replicas, and the sizes of their microbatches."""
    parts, zero = rng.choice([1, 2, 3]), rng.randrange(4)
    equal = [2] * parts
    match rng.randrange(7):
        case 0:
            return [Place(where(), [0]), Split("MB", parts)], 1, equal
        case 1:
            return (
                [*stages([0], [1]), *[Remat(where())] * (parts > 1), Split("MB", parts)],
                1,
                equal,
            )
        case 2:
            kept = Replicate(where(), [0, 1], zero=zero)
            return [Place(where(), [0, 1]), kept, Split("MB", parts)], 2, equal
        case 3:
            kept = [Replicate(where(PP=0), [0, 2], zero=zero), Replicate(where(PP=1), [1, 3])]
            return [*stages([0, 2], [1, 3]), *kept, Split("MB", parts)], 2, equal
        case 4:
            return [*BUILDERS["zbv"](pp=1, microbatches=2, dp=2, zero=zero)], 2, [2, 2]
        case 5:
            return [*BUILDERS["1f1b"](pp=2, microbatches=4)], 1, [3] * 4
    return [*stages([0], [1]), Split("MB", 2, sizes=[2, 1])], 1, [4, 2]


def stages(one: list[int], other: list[int]) -> list[Directive]:
    return [Place(where(PP=0), one), Place(where(PP=1), other)]


def case(seed: int) -> Case:
    rng, names = random.Random(seed), list(MODELS)
    model = names[seed % len(names)]
    loss = rng.choice(MEANS if model in INTERACTING else list(LOSSES))
    return Case(seed, model, loss, rng.choice(OPTIMIZERS), *strategy_of(rng))


def plainly(case: Case) -> tuple[list[float], nn.Module]:
    """The whole batch at once; or as each replica sees it, with its own buffers."""
    copies, losses = [case.build() for _ in case.pieces], []
    optimizer = case.optimizer([p for p in copies[0].parameters() if p.requires_grad])
    for batch in case.batches:
        found = 0.0
        for copy, x, y in pieces(case, copies, batch):
            loss = LOSSES[case.loss](copy(x), y) * (len(x) / len(batch[0]))
            loss.backward()
            found += loss.item()
        losses.append(found)
        reduce(copies)
        optimizer.step()
        share(copies)
    return losses, copies[0]


def pieces(
    case: Case, copies: list[nn.Module], batch: tuple[Tensor, Tensor]
) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    rows = [size for sizes in case.pieces for size in sizes]
    owners = [copy for copy, sizes in zip(copies, case.pieces, strict=True) for _ in sizes]
    yield from zip(owners, *(tensor.split(rows) for tensor in batch), strict=True)


def reduce(copies: list[nn.Module]) -> None:
    """The first copy gets the sum of all gradients."""
    for first, *others in zip(*(copy.parameters() for copy in copies), strict=True):
        found = [one.grad for one in (first, *others) if one.grad is not None]
        first.grad = sum(found[1:], found[0]) if found else None
        for one in others:
            one.grad = None


def share(copies: list[nn.Module]) -> None:
    """All copies get the parameters of the first."""
    with torch.no_grad():
        for first, *others in zip(*(copy.parameters() for copy in copies), strict=True):
            first.grad = None
            for one in others:
                one.copy_(first)


def outcome(case: Case) -> str:
    losses, model = plainly(case)
    try:
        found = rehearse(
            case.build(), LOSSES[case.loss], case.strategy, case.batches, optimizer=case.optimizer
        )
    except PiperError as refused:
        return f"refused: {refused}"
    wrong = [k for k, pair in enumerate(zip(found.losses, losses, strict=True)) if apart(*pair)]
    if wrong:
        return f"different: the loss of step {wrong[0]}"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in found.parameters and apart(found.parameters[name], tensor.detach()):
            return f"different: {name}"
    return "equal"


def apart(found: Any, wanted: Any) -> bool:
    one, other = (torch.as_tensor(x).double() for x in (found, wanted))
    return not torch.allclose(one, other, rtol=1e-8, atol=1e-8)


@drawn
def test_code_of_researchers_trains_as_in_pytorch_or_is_refused() -> None:
    for seed in range(draws(2, 160)):
        found = case(seed)
        result = outcome(found)

        assert result == "equal" or "fix:" in result, f"{found}: {result}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for number in range(*map(int, sys.argv[1:3])):
        drawn_case = case(number)
        try:
            result = outcome(drawn_case)
        except Exception as error:
            result = f"crash: {type(error).__name__} {error}"
        counts[result.split(":")[0]] += 1
        print(number, drawn_case.model, drawn_case.loss, result.splitlines()[0], flush=True)
    print(dict(counts))
