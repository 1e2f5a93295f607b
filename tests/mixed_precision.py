"""Mixed precision by hand: a plain loop with masters, and the models that it trains.

The loop knows nothing of Piper: it converts the masters, runs autograd on one microbatch after the
other, adds the gradients up, clips, steps the optimizer on the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import experts
import torch
from replicas import FEATURES, STEPS, Uneven
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Precision, Strategy, Trainer
from piper.capture import Captured, annotate, capture
from piper.ir.placement.replicas import replicas

# A larger eps: by default, AdamW's first steps turn a gradient of rounding errors into +-lr.
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4)
PARTS = 4  # microbatches of all replicas, in `train`
TIGHT = Precision(compute="float32", master="float64", reduce="float64", output="float64")
BF16 = Precision()


@dataclass
class ByHand:
    """The results of the loop."""

    losses: list[dict[int, float]] = field(default_factory=list)  # of microbatches, by step
    norms: list[float] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)


def by_hand(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    precisions: Sequence[Precision],
    batches: Sequence[tuple[Tensor, Tensor]],
    parts: int,
    max_norm: float | None = None,
    kept: tuple[str, ...] = (),
    reduced: Sequence[Mapping[str, str]] = (),
) -> ByHand:
    """Train with masters, one precision for each step, of which only the types are read.

    `kept`: the modules that read their masters themselves. `reduced`: for each step, how
    names of parameters begin whose gradients are added up in another type.
    """
    named = dict(model.named_parameters())
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in named.items() if p.requires_grad}
    optimizer, result = ADAMW(list(masters.values())), ByHand()
    reduced = reduced or [{}] * len(batches)
    for (x, y), types, others in zip(batches, precisions, reduced, strict=True):
        compute, reduce = (getattr(torch, name) for name in (types.compute, types.reduce))
        frozen = {n: p.detach().to(compute) for n, p in named.items() if n not in masters}
        optimizer = in_type(masters, optimizer, getattr(torch, types.master))
        total: dict[str, Tensor] = {}
        losses = {}
        for part, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            copies = {
                n: (
                    m.detach().clone() if n.startswith(kept) else m.detach().to(compute, copy=True)
                ).requires_grad_()
                for n, m in masters.items()
            }
            given = a.to(compute) if a.is_floating_point() else a
            found = torch.func.functional_call(model, {**frozen, **copies}, (given,))
            loss = loss_fn(converted(found, getattr(torch, types.output)), b)
            (loss / parts).backward()
            losses[part] = loss.item()
            for name, copy in copies.items():
                if copy.grad is not None:
                    other = [t for start, t in others.items() if name.startswith(start)]
                    grad = copy.grad.to(getattr(torch, other[-1]) if other else reduce)
                    total[name] = total[name] + grad if name in total else grad
        for name, grad in total.items():
            masters[name].grad = grad.to(masters[name].dtype)
        result.norms.append(clipped([m for m in masters.values() if m.grad is not None], max_norm))
        optimizer.step()
        result.losses.append(losses)
    result.masters = {name: m.detach() for name, m in masters.items()} | frozen
    return result


def in_type(
    masters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, dtype: torch.dtype
) -> torch.optim.Optimizer:
    """Masters and their moments in this type, for the steps that follow."""
    if all(master.dtype == dtype for master in masters.values()):
        return optimizer
    held = [dict(optimizer.state.get(master, {})) for master in masters.values()]
    for name, master in masters.items():
        masters[name] = nn.Parameter(master.detach().to(dtype))
    made = ADAMW(list(masters.values()))
    for master, state in zip(masters.values(), held, strict=True):
        if state:
            made.state[master] = {k: v if k == "step" else v.to(dtype) for k, v in state.items()}
    return made


def converted(found: Any, dtype: torch.dtype) -> Any:
    return found.to(dtype) if isinstance(found, Tensor) else [one.to(dtype) for one in found]


def clipped(masters: Sequence[nn.Parameter], max_norm: float | None) -> float:
    norms = [m.grad.double().norm() for m in masters if m.grad is not None]
    norm = torch.stack(norms).norm()
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(masters, max_norm, norm)
    return norm.item()


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


class NormedByHand(Normed):
    """The same, with a norm in float32 that converts by hand."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x).float()).to(x.dtype))
        return self.last(x)


def squares(output: Tensor, target: Tensor) -> Tensor:
    """The mean square error of any two types. That of torch 2.11 has no backward for them."""
    return functional.mse_loss(output, target.to(output.dtype))


def build(name: str, stages: int) -> tuple[nn.Module, Any]:
    """Models in float32."""
    torch.manual_seed(3)
    if name == "normed":
        return Normed(), squares
    if name == "uneven":
        return Uneven(stages), squares
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
    return by_hand(model, loss_fn, [precision] * STEPS, batches(name, parts), parts, max_norm)


@cache
def captured(name: str, stages: int, precision: Precision) -> tuple[nn.Module, Any, Captured]:
    model, loss_fn = build(name, stages)
    x, y = batches(name, 1)[0]
    given = (x.to(getattr(torch, precision.compute)), y)
    return model, loss_fn, capture(model, loss_fn, given, "cpu", (), precision)


def train(
    rank: int, strategy: str, precision: Precision | None, done: int, steps: int, folder: str
) -> tuple[list[float], dict[str, Tensor] | None]:
    """One process of a run of "uneven", from one step to another; from a checkpoint to another."""
    directives = Strategy.from_json(strategy)
    feeds = replicas(d.devices for d in directives if isinstance(d, Place))
    mine = [
        tuple(t.chunk(len(feeds.feeds))[feeds.feed(rank)] for t in batch)
        for batch in batches("uneven", PARTS)
    ]
    model, loss_fn = build("uneven", 2)
    trainer = Trainer(
        model, loss_fn, directives, example=mine[0], optimizer=ADAMW, precision=precision
    )
    assert trainer.resume(folder, missing_ok=True) == done
    losses = [trainer.step(*batch).loss for batch in mine[done : done + steps]]
    trainer.save(folder)
    whole = trainer.state_dict()
    trainer.close()
    return losses, whole
