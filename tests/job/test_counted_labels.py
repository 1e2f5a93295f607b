"""Means over labels other than -100 that no graph shows: the error has the line to write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, Strategy, rehearse, where
from piper.errors import InputError
from piper.job.loss.counted_labels import COUNTED

CLASSES = 5
SGD = partial(torch.optim.SGD, lr=0.1)
summed = partial(F.cross_entropy, reduction="sum")
Loss = Callable[[Tensor, Tensor], Tensor]


def chunked(output: Tensor, labels: Tensor) -> Tensor:
    chunks = zip(output.flatten(0, 1).chunk(4), labels.flatten().chunk(4), strict=True)
    return sum((summed(*one) for one in chunks), torch.zeros(())) / (labels != -100).sum()


def in_a_loop(output: Tensor, labels: Tensor) -> Tensor:
    rows = [summed(*row) for row in zip(output, labels, strict=True)]
    return torch.stack(rows).sum() / (labels != -100).sum()


MEANS: dict[str, Loss] = {"chunks": chunked, "a loop": in_a_loop}
OTHERS: dict[str, Loss] = {
    "per row": lambda output, labels: torch.stack(
        [F.cross_entropy(*row) for row in zip(output, labels, strict=True)]
    ).mean(),
    "a norm": lambda output, labels: chunked(output, labels).sqrt(),
    "the hardest": lambda output, labels: (
        F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none").topk(3).values
    ).mean(),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(CLASSES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Rows of different lengths, of which each has a label."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        x, y = (torch.randint(CLASSES, (8, 6), generator=draw) for _ in range(2))
        lengths = torch.randint(1, 6, (8, 1), generator=draw)
        found.append((x, y.masked_fill(torch.arange(6) >= lengths, -100)))
    return found


STRATEGIES = {
    "replicas": [Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=2), Split("MB", 2)],
    "microbatches": [Place(where(), [0]), Split("MB", 4)],
}


@one_of(2)
@pytest.mark.parametrize("strategy", every(2, STRATEGIES.values(), STRATEGIES))
@pytest.mark.parametrize("loss_fn", every(2, MEANS.values(), MEANS))
def test_the_line_that_the_error_says_trains_as_the_whole_batch(
    loss_fn: Loss, strategy: list[Place | Replicate | Split]
) -> None:
    with pytest.raises(InputError) as refused:
        rehearse(net(), loss_fn, Strategy(strategy), batches(), optimizer=SGD)
    assert f"fix: if it is a mean over the labels other than -100, give the Trainer {COUNTED}" in (
        str(refused.value)
    )
    model = net()
    losses = plain_losses(SGD(model.parameters()), batches(), lambda x, y: loss_fn(model(x), y))

    found = rehearse(
        net(), loss_fn, Strategy(strategy), batches(), optimizer=SGD,
        loss_weight=lambda *microbatch: (microbatch[-1] != -100).sum(),
    )  # fmt: skip

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, one in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], one.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss_fn", OTHERS.values(), ids=OTHERS)
def test_the_line_is_not_said_of_others(loss_fn: Loss) -> None:
    with pytest.raises(InputError) as refused:
        rehearse(net(), loss_fn, Strategy(STRATEGIES["microbatches"]), batches(), optimizer=SGD)

    assert COUNTED not in str(refused.value)
