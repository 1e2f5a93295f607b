"""Numbers that a forward reads with `.item()`: as an index, in a text, and what is refused."""

from __future__ import annotations

import io
import json
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from draws import drawn, draws, every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Trainer, rehearse, where
from piper.capture.torch_private import new_fake_mode
from piper.capture.trace.replaced.calls import ReplacedCalls
from piper.capture.tracing_private import trace_forward
from piper.errors import CaptureError

SHAPE = (4, 6, 5)


def index_of(rng: random.Random, i: Any) -> tuple[Any, ...]:
    """An index of a tensor with three dimensions, in which `i` stands once or more."""
    count = rng.randrange(1, 4)
    parts = [rng.choice([i, i, slice(None), slice(1, 3), 2, -1]) for _ in range(count)]
    parts[rng.randrange(count)] = i
    if rng.random() < 0.5:
        parts.insert(rng.randrange(len(parts) + 1), ...)
    for _ in range(rng.randrange(2)):
        parts.insert(rng.randrange(len(parts) + 1), None)
    return tuple(parts)


def by_number(seed: int, item: bool) -> Callable[[Tensor], list[Tensor]]:
    """Reads and writes by an index that depends on values, as a number or a tensor."""

    def forward(x: Tensor) -> list[Tensor]:
        best = x[0, 0, :4].argmax()
        index = index_of(random.Random(seed), best.item() if item else best)
        written = x.clone()
        written[index] = 0.5
        return [x[index].clone(), written]

    return forward


@drawn
def test_numbers_index_as_in_eager_training() -> None:
    for seed in range(draws(7, 500)):
        forward, x = by_number(seed, item=seed % 2 == 0), torch.randn(SHAPE)
        with new_fake_mode(), ReplacedCalls():
            graph = trace_forward(forward, torch.empty(SHAPE))

        for found, right in zip(graph(x), forward(x), strict=True):
            assert torch.equal(found, right), seed


class Chooses(nn.Module):
    """With gradients through what is chosen, and through what is written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.table = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        best = h[0].argmax().item()
        print(f"{best:03d} {h.mean().item():.4f} {h.std():>9.2e}", file=io.StringIO())
        changed = h.clone()
        changed[:, best] = self.table[best, 0]
        changed = changed + h[:, : best + 1].sum(1, keepdim=True)
        return changed + self.table[best] * h[:, best, None] + h[..., h[1].argmin(), None]


def test_training_with_numbers_is_that_of_plain_pytorch() -> None:
    draw = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randn(2, 8, 6, dtype=torch.float64, generator=draw)) for _ in range(3)]
    plain = Chooses().double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = plain_losses(optimizer, batches, lambda x, y: F.mse_loss(plain(x), y))

    model, strategy = Chooses().double(), [Place(where(), [0])]
    found = rehearse(model, F.mse_loss, strategy, batches, optimizer=sgd)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, one in plain.named_parameters():
        torch.testing.assert_close(found.parameters[name], one.detach(), rtol=1e-12, atol=1e-13)


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)  # type: ignore[arg-type]


Use = Callable[[Tensor], Any]
VALUE, MEMORY = "needs the value of a tensor", "reads the memory of a tensor"
SIZE = "whose size comes from a value"
REFUSED: dict[str, tuple[Use, str]] = {
    "JSON": (lambda h: json.dumps({"mean": h.mean().item()}), VALUE),
    "a key": (lambda h: {0: 1.0}.get(h[0].argmax().item(), 2.0), VALUE),
    "of a list": (lambda h: [1.0, 2.0][h[0].argmax().item()], VALUE),
    "percent": (lambda h: "%.3f" % h.mean().item(), VALUE),  # noqa: UP031
    "an exponent": (lambda h: h ** (h[0].argmax().item() + 1), "differs from batch to batch"),
    "a slice beside all": (lambda h: h[:, (k := h[0].argmax().item()) : k + 1] + h, SIZE),
    "a part beside all": (lambda h: h.narrow(1, h[0].argmax().item(), 1) * h, SIZE),
    "a head beside all": (lambda h: h[:, : h[0].argmax().item() + 1] - h, SIZE),
    "a branch": (
        lambda h: torch.cond(h.sum() > 0, lambda h: h[h[0].argmax()] + h, lambda h: h + 1, (h,)),
        VALUE,
    ),
    "threads": (lambda h: sum(ThreadPoolExecutor(2).map(h.mul, [1, 2])), "in another thread"),
    "pickle": (lambda h: pickle.dumps(h), MEMORY),
    "torch.save": (lambda h: torch.save(h, io.BytesIO()), MEMORY),
    "an address": (lambda h: h.data_ptr(), MEMORY),
    "its storage": (lambda h: h.untyped_storage().data_ptr(), MEMORY),
    "DLPack": (lambda h: torch.from_dlpack(h), MEMORY),
}


@one_of(3)
@pytest.mark.parametrize("in_loss", [False, True], ids=["forward", "loss"])
@pytest.mark.parametrize(("use", "text"), every(3, REFUSED.values(), REFUSED))
def test_what_needs_values_is_refused_with_its_line(use: Use, text: str, in_loss: bool) -> None:
    class Uses(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return with_use(super().forward(x)) if not in_loss else super().forward(x)

    def with_use(h: Tensor) -> Tensor:
        found = use(h)
        return found if isinstance(found, Tensor) else h

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(with_use(output) if in_loss else output, labels)

    example = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.raises(CaptureError, match=text) as error:
        Trainer(Uses(3, 3), loss_fn, example=example, device="cpu")

    assert "test_item_numbers.py:" in str(error.value)
