"""How the losses of microbatches become the loss of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from piper.errors import InputError, Problem
from piper.job.batch import Batch

Reduction = Literal["mean", "sum"]
Weight = Callable[..., Any]  # of the arguments of a microbatch
Ignored = tuple[int | None, int | None]  # batch tensor, label; None where it cannot be told


@dataclass(frozen=True, slots=True)
class LossReduction:
    """A mean or a sum; `weight` is what the user says that a microbatch weighs."""

    kind: Reduction = "mean"
    weight: Weight | None = None

    @property
    def is_plain_mean(self) -> bool:
        """All microbatches weigh the same, which must then be true of their loss."""
        return self.kind == "mean" and self.weight is None

    def weights(self, batch: Batch, parts: int) -> list[float]:
        """What each microbatch of a batch weighs."""
        if self.weight is None:
            return [1.0] * parts
        found = [float(self.weight(*one.arguments)) for one in batch.parts(parts)]
        if self.kind == "mean":
            refuse_empty(found)
        return found

    def shares(self, own: Sequence[float], everyone: float) -> tuple[float, ...]:
        """What each microbatch counts in the loss; `everyone`: the weight of all replicas.

        >>> LossReduction("mean").shares([1.0, 3.0], 8.0), LossReduction("sum").shares([1.0], 8.0)
        ((0.125, 0.375), (1.0,))
        """
        if self.kind == "sum":
            return (1.0 / everyone if self.weight else 1.0,) * len(own)
        return tuple(weight / everyone for weight in own)


def reduction_of(
    said: str | None, loss_fn: Any, weight: Weight | None, parts: int
) -> LossReduction:
    """What a loss function does can be tried (loss_trial.py); what a model does with its own rows
    cannot, so its user has to say it."""
    if said is None and loss_fn is None and weight is None and parts > 1:
        raise InputError(
            "reduction",
            Problem(
                f"the model gives its own loss, of each of {parts} parts of a batch, and Piper "
                "cannot see what becomes of rows in it",
                'give the Trainer reduction="mean" if all parts count alike, "sum" if they add up, '
                "or loss_weight=lambda *microbatch: what it counts",
            ),
        )
    match said:
        case None | "mean":
            return LossReduction("mean", weight)
        case "sum":
            return LossReduction("sum", weight)
    raise InputError("reduction", Problem(f"{said!r} is no reduction", 'write "mean" or "sum"'))


def refuse_ignored(batch: Batch, ignored: Sequence[Ignored]) -> None:
    """A mean over the labels that count is not the mean of the microbatches' means."""
    for index, label in ignored:
        if index is None or label is None:
            raise InputError(
                "loss",
                Problem(
                    "cross_entropy weighs classes, or its labels are computed, so microbatches "
                    "may weigh differently",
                    "give the Trainer loss_weight=lambda *microbatch: the weight of its labels, "
                    "or 1 if all weigh the same",
                ),
            )
        if (batch.tensors[index] == label).any():
            raise InputError(
                "batch",
                Problem(
                    f"it has labels that cross_entropy ignores ({label}), so microbatches weigh "
                    "differently",
                    "give the Trainer loss_weight=lambda *microbatch: the number of labels that "
                    "count",
                ),
            )


def refuse_empty(weights: Sequence[float]) -> None:
    for part, weight in enumerate(weights):
        if weight <= 0:
            raise InputError(
                "batch",
                Problem(
                    f"microbatch {part} weighs {weight:g}: a mean over nothing is not a number",
                    'use a loss that is a sum, and Trainer(reduction="sum", loss_weight=...)',
                ),
            )


def refuse_weightless(everyone: float) -> None:
    if everyone <= 0:
        raise InputError(
            "batch",
            Problem(
                "no microbatch of any replica weighs anything",
                "leave such a batch out, or let loss_weight count something in it",
            ),
        )
