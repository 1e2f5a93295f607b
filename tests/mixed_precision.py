"""Mixed precision by hand: a plain loop with masters, and the models that it trains.

The loop knows nothing of Piper: it converts the masters, runs autograd on one microbatch after the
other, adds the gradients up, clips, steps the optimizer on the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import experts
import torch
from replicas import FEATURES, STEPS, Uneven
from torch import Tensor, nn
from torch.nn import functional

from piper import Precision
from piper.capture import Captured, annotate, capture

# A larger eps: by default, AdamW's first steps turn a gradient of rounding errors into +-lr.
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4)
TIGHT = Precision(compute="float32", master="float64", reduce="float64", output="float64")
BF16 = Precision()


@dataclass
class ByHand:
    """The results of the loop."""

    losses: list[dict[int, float]] = field(default_factory=list)  # of microbatches, by step
    norms: list[float] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)  # exp_avg of each parameter


def by_hand(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    precision: Precision,
    batches: Sequence[tuple[Tensor, Tensor]],
    parts: int,
    max_norm: float | None = None,
) -> ByHand:
    """Train with masters. `precision` is read for the names of its types only."""
    compute, master, reduce, output = (
        getattr(torch, name)
        for name in (precision.compute, precision.master, precision.reduce, precision.output)
    )
    named = dict(model.named_parameters())
    masters = {n: nn.Parameter(p.detach().to(master)) for n, p in named.items() if p.requires_grad}
    frozen = {n: p.detach().to(compute) for n, p in named.items() if n not in masters}
    optimizer, result = ADAMW(list(masters.values())), ByHand()
    for x, y in batches:
        total: dict[str, Tensor] = {}
        losses = {}
        for part, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            copies = {n: m.detach().to(compute).requires_grad_() for n, m in masters.items()}
            given = a.to(compute) if a.is_floating_point() else a
            found = torch.func.functional_call(model, {**frozen, **copies}, (given,))
            found = found.to(output) if isinstance(found, Tensor) else [t.to(output) for t in found]
            loss = loss_fn(found, b)
            (loss / parts).backward()
            losses[part] = loss.item()
            for name, copy in copies.items():
                if copy.grad is not None:
                    grad = copy.grad.to(reduce)
                    total[name] = total[name] + grad if name in total else grad
        for name, grad in total.items():
            masters[name].grad = grad.to(master)
        grads = [m.grad.double().norm() for m in masters.values() if m.grad is not None]
        result.norms.append(torch.stack(grads).norm().item())
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(
                masters.values(), max_norm, torch.tensor(result.norms[-1], dtype=torch.float64)
            )
        optimizer.step()
        result.losses.append(losses)
    result.masters = {name: m.detach() for name, m in masters.items()} | frozen
    result.moments = {
        n: optimizer.state[m]["exp_avg"] for n, m in masters.items() if m.grad is not None
    }
    return result


class Normed(nn.Module):
    """Two regions, the first with a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(FEATURES, 5), nn.LayerNorm(5)
        self.last = nn.Linear(5, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = torch.tanh(self.norm(self.first(x)))
        with annotate("PP"):
            return self.last(x)


def build(name: str, stages: int) -> tuple[nn.Module, Any]:
    """Models in float32."""
    torch.manual_seed(3)
    if name == "normed":
        return Normed(), functional.mse_loss
    if name == "uneven":
        return Uneven(stages), functional.mse_loss
    return experts.Mixed(stages, name.removeprefix("moe ")), experts.loss


def batches(name: str, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Different data in every row and step."""
    draw = torch.Generator().manual_seed(11)
    size = (rows, 5, experts.WIDTH) if name.startswith("moe") else (rows, FEATURES)
    rand = partial(torch.randn, size, generator=draw)
    return [(rand(), rand()) for _ in range(STEPS)]


@cache
def reference(
    name: str, stages: int, precision: Precision, parts: int, max_norm: float | None = None
) -> ByHand:
    model, loss_fn = build(name, stages)
    return by_hand(model, loss_fn, precision, batches(name, parts), parts, max_norm)


@cache
def captured(name: str, stages: int, precision: Precision) -> tuple[nn.Module, Any, Captured]:
    model, loss_fn = build(name, stages)
    x, y = batches(name, 1)[0]
    given = (x.to(getattr(torch, precision.compute)), y)
    return model, loss_fn, capture(model, loss_fn, given, "cpu", precision)
