"""A model with data-dependent sizes between stages: a pool job and its reference."""

from __future__ import annotations

import torch
from small_models import Sifted
from torch import Tensor

from piper.directives import Strategy
from piper.plan.analyse.required_communicators import RequiredCommunicators
from piper.plan.instructions import Shape
from piper.runtime.comm.gloo import ProcessComm
from piper.trainer import Trainer

PARTS, STEPS = 4, 3


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8 * PARTS, 4, generator=generator) for _ in range(STEPS)]


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)  # type: ignore[arg-type]


def train(rank: int, strategy: str) -> tuple[list[float], dict[str, Tensor] | None]:
    trainer = Trainer(
        Sifted(), None, Strategy.from_json(strategy), optimizer=sgd, reduction="sum",
        example=(batches()[0],),
    )  # fmt: skip
    losses = [trainer.step(batch).loss for batch in batches()]
    whole = trainer.state_dict()
    trainer.close()
    return losses, whole


def plain() -> tuple[list[float], dict[str, Tensor]]:
    model, losses = Sifted(), []
    optimizer = sgd(model.parameters())
    for batch in batches():
        loss = sum(model(part) for part in batch.chunk(PARTS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


SENT = ([torch.arange(6.0).view(3, 2), torch.arange(4.0)], [torch.ones(2)], [torch.zeros(0, 2)])
SHAPES: tuple[tuple[Shape, ...], ...] = (
    (((None, 2), "float32"), ((None,), "float32")),
    (((2,), "float32"),),
    (((None, 2), "float32"),),
)


def converse(rank: int) -> list[list[Tensor]]:
    """Post three messages on one link before waiting for the first."""
    link = ("pp", 0, 1)
    comm = ProcessComm()
    comm.extend(RequiredCommunicators(streams=["pp"], links=[link], dynamic_links=[link]))
    if rank == 0:
        pairs = zip(SENT, SHAPES, strict=True)
        sends = [comm.send(tuple(sent), shapes, 1, "pp") for sent, shapes in pairs]
        got = [one.wait() for one in sends] and []
    else:
        coming = [comm.recv(shapes, 0, "pp", None) for shapes in SHAPES]
        got = [list(one.wait()) for one in coming]
    comm.close()
    return got
