"""Models with running statistics, and a plain process that trains several replicas of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.capture import annotate
from piper.directives import Strategy

WIDTH, STEPS = 6, 3
BUFFERS = ("running_mean", "running_var", "largest", "seen")
ADAM = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1)  # has no state
Data = list[tuple[Tensor, Tensor]]


class Logged(nn.Module):
    """Statistics that the user's code keeps in every mode, and that only a log reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.abs().amax(0)))
            self.seen += x.shape[0]
        return x


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "plain means": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "without weights": lambda: nn.BatchNorm1d(WIDTH, affine=False, momentum=0.3),
    "logged": Logged,
}


def block(norm: str) -> nn.Module:
    """Without a bias: before a batch norm, its gradient is nothing but rounding."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), NORMS[norm](), nn.Tanh())


class Normed(nn.Module):
    """One layer in each stage; or "all", with a layer of each kind in a few stages."""

    def __init__(self, norm: str, stages: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        kinds = list(NORMS) if norm == "all" else [norm] * stages
        self.layers, self.stages = nn.ModuleList(map(block, kinds)), stages

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with annotate("PP", number * self.stages // len(self.layers)):
                x = x + layer(x)
        return x


def data(rows: int, steps: int = STEPS) -> Data:
    """Different data in every row and step."""
    draw = torch.Generator().manual_seed(13)
    rand = partial(torch.randn, rows, WIDTH, generator=draw, dtype=torch.float64)
    return [(1.0 + rand(), rand()) for _ in range(steps)]


@dataclass
class Trained:
    """The loss of each step, and the state of the first replica at the end."""

    losses: list[float]
    model: nn.Module

    @property
    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def plainly(
    model: nn.Module, batches: Data, replicas: int, parts: int, make: Any = ADAM
) -> Trained:
    """Each replica has its own buffers and microbatches. All have the mean of the gradients."""
    copies = [copy.deepcopy(model) for _ in range(replicas)]
    for one in copies[1:]:
        for name, parameter in copies[0].named_parameters():
            *path, last = name.split(".")
            setattr(one.get_submodule(".".join(path)), last, parameter)  # shared; buffers are not
    optimizer, losses = make(copies[0].parameters()), []
    for x, y in batches:
        optimizer.zero_grad()
        pieces = zip(x.chunk(replicas * parts), y.chunk(replicas * parts), strict=True)
        found = [
            functional.mse_loss(copies[k // parts](a), b) / (replicas * parts)
            for k, (a, b) in enumerate(pieces)
        ]
        sum(found).backward()
        optimizer.step()
        losses.append(sum(one.item() for one in found))
    return Trained(losses, copies[0])


def assert_state(found: dict[str, Tensor] | Any, wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-13, msg=name)


def half(batch: Sequence[Tensor], trainer: piper.Trainer) -> tuple[Tensor, ...]:
    return tuple(one.chunk(trainer.replicas)[trainer.replica] for one in batch)


def train_and_read(rank: int, first: str, second: str, folder: str) -> dict[str, Any]:
    """Train under a strategy, read all that can be read, and go on under another one."""
    model, found = Normed("all", 2).double(), dict[str, Any]()
    batches, kept = data(16, 2 * STEPS), Path(folder)
    trainer = piper.Trainer(
        model, functional.mse_loss, Strategy.from_json(first), example=batches[0], optimizer=SGD
    )
    for batch in batches[:STEPS]:
        trainer.step(*half(batch, trainer))
    held_out = half(batches[-1], trainer)
    found["state"] = trainer.state_dict()
    found["loss"] = trainer.evaluate([held_out]).loss
    found["output"] = trainer.predict(held_out[0])
    trainer.step(*half(batches[STEPS], trainer))
    trainer.save(kept / "saved")
    trainer.export(kept / "exported")
    found["buffers"] = buffers_of(trainer)
    trainer.step(*half(batches[STEPS + 1], trainer))
    trainer.retarget(Strategy.from_json(second))
    found["moved"] = buffers_of(trainer)
    trainer.close()
    return found


def buffers_of(trainer: piper.Trainer) -> dict[str, Tensor]:
    parts = trainer._programs.state.parts()
    return {
        one.name: one.values.clone() for one in parts if "running" in one.name or "seen" in one.name
    }


def resume_and_go_on(rank: int, text: str, folder: str) -> dict[str, Any]:
    """Continue a run of other replicas."""
    model, batches = Normed("all", 2).double(), data(16, 2 * STEPS)
    strategy = Strategy.from_json(text)
    trainer = piper.Trainer(model, functional.mse_loss, strategy, example=batches[0], optimizer=SGD)
    trainer.resume(Path(folder) / "saved")
    trainer.step(*half(batches[STEPS + 1], trainer))
    found = trainer.state_dict()
    trainer.close()
    return {"state": found}
