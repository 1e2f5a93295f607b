"""Jobs for workers: what a device holds of experts, and what tuning leaves as it was."""

from __future__ import annotations

from dataclasses import dataclass

from replicas import ADAMW, batches, known, optimizer_parts
from shared_capture import using

from piper.costs import Costs
from piper.directives import Strategy
from piper.trainer import Trainer

NAMES = ("into", "back", "gain")


@dataclass
class Tuned:
    """What one device saw."""

    costs: Costs
    before: list[bytes]
    after: list[bytes]
    losses: list[float]
    untuned: list[float]


def trainer_of(rank: int, text: str) -> tuple[Trainer, list]:
    model, loss, found = known(rank, "moe spread", 1, 1)
    mine = [tuple(t.chunk(2)[rank] for t in batch) for batch in batches("moe spread", 4)]
    with using(found):
        trainer = Trainer(model, loss, Strategy.from_json(text), optimizer=ADAMW, example=mine[0])
    return trainer, mine


def shares(rank: int, text: str) -> dict[str, int]:
    """Elements of experts' parameters, gradients and optimizer state here."""
    trainer, mine = trainer_of(rank, text)
    found = {"parameters": 0, "gradients": 0}
    for program in trainer._programs.ready.values():
        program.watch = lambda bucket: found.update(  # type: ignore[method-assign]
            gradients=found["gradients"]
            + sum(p.grad.numel() for name, _, _, p, _ in bucket.parts() if name.endswith(NAMES))
        )
    trainer.step(*mine[0])
    parts = [part for part in trainer._programs.state.parts() if part.name.endswith(NAMES)]
    found["parameters"] = sum(part.values.numel() for part in parts)
    for key, kept in optimizer_parts(trainer._programs.state).items():
        found[key] = sum(part.values.numel() for part in kept if part.name.endswith(NAMES))
    trainer.close()
    return found


def tune(rank: int, text: str) -> Tuned:
    losses = []
    for tuning in (False, True):
        trainer, mine = trainer_of(rank, text)
        trainer.step(*mine[0])
        before = bits(trainer)
        costs = trainer.tune(*mine[1]) if tuning else Costs()
        after = bits(trainer)
        losses.append([trainer.step(*batch).loss for batch in mine[1:]])
        trainer.close()
    return Tuned(costs, before, after, losses[1], losses[0])


def bits(trainer: Trainer) -> list[bytes]:
    kept = [p for parts in optimizer_parts(trainer._programs.state).values() for p in parts]
    return [part.values.numpy().tobytes() for part in (*trainer._programs.state.parts(), *kept)]
