"""How the losses of microbatches become the loss of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from piper.capture.trace.call_arguments import as_given
from piper.errors import InputError
from piper.job.batch import Batch

Reduction = Literal["mean", "sum"]
Weight = Callable[..., Any]  # a function of the arguments of a microbatch
Ignored = tuple[int | None, int | None]  # batch tensor, label; None: unknown


@dataclass(frozen=True, slots=True)
class LossReduction:
    """A mean or a sum. `weight` is the user's function for the weight of a microbatch."""

    kind: Reduction = "mean"
    weight: Weight | None = None

    @property
    def is_plain_mean(self) -> bool:
        """Whether all microbatches have the same weight. Then the loss must be a plain mean."""
        return self.kind == "mean" and self.weight is None

    def weights(self, batch: Batch, parts: int) -> list[float]:
        """The weight of each microbatch of a batch."""
        if self.weight is None:
            return [1.0] * parts
        found = [weight_of(self.weight, one) for one in batch.parts(parts)]
        if self.kind == "mean":
            refuse_empty(found)
        return found

    def shares(self, own: Sequence[float], everyone: float) -> tuple[float, ...]:
        """The factor of each microbatch in the loss. `everyone` is the weight of all replicas.

        >>> LossReduction("mean").shares([1.0, 3.0], 8.0), LossReduction("sum").shares([1.0], 8.0)
        ((0.125, 0.375), (1.0,))
        """
        if self.kind == "sum":
            return (1.0 / everyone if self.weight else 1.0,) * len(own)
        return tuple(weight / everyone for weight in own)


def weight_of(weight: Weight, microbatch: Batch) -> float:
    """The user's weight of a microbatch, which it gets as the step got the batch."""
    given, named = as_given(microbatch.arguments)
    return float(weight(*given, **named))


def reduction_of(
    said: str | None, loss_fn: Any, weight: Weight | None, parts: int
) -> LossReduction:
    """The reduction of a loss function is tested (mean_loss_check.py). That of a model's own loss
    cannot be tested, so the user has to say it."""
    if said is None and loss_fn is None and weight is None and parts > 1:
        raise InputError.of(
            "reduction",
            f"the model computes its own loss, for each of {parts} parts of a batch, and Piper "
            "cannot see how it reduces over rows",
            'give the Trainer reduction="mean" if all parts count equally, "sum" if they add '
            "up, or loss_weight=lambda *microbatch: its weight",
        )
    match said:
        case None | "mean":
            return LossReduction("mean", weight)
        case "sum":
            return LossReduction("sum", weight)
    raise InputError.of("reduction", f"{said!r} is not a reduction", 'write "mean" or "sum"')


def refuse_ignored(batch: Batch, ignored: Sequence[Ignored]) -> None:
    """With ignored labels, the mean of the batch is not the mean of the microbatches' means."""
    for index, label in ignored:
        if index is None or label is None:
            raise InputError.of(
                "loss",
                "cross_entropy has class weights, or its labels are computed, so microbatches "
                "may have different weights",
                "give the Trainer loss_weight=lambda *microbatch: the weight of its labels, "
                "or 1 if all have the same weight",
            )
        if (batch.tensors[index] == label).any():
            raise InputError.of(
                "batch",
                f"it has labels that cross_entropy ignores ({label}), so microbatches have "
                "different weights",
                "give the Trainer loss_weight=lambda *microbatch: the number of labels that count",
            )


def refuse_empty(weights: Sequence[float]) -> None:
    for part, weight in enumerate(weights):
        if weight <= 0:
            raise InputError.of(
                "batch",
                f"microbatch {part} has weight {weight:g}: a mean over nothing is not a number",
                'use a loss that is a sum, and Trainer(reduction="sum", loss_weight=...)',
            )


def refuse_weightless(everyone: float) -> None:
    if everyone <= 0:
        raise InputError.of(
            "batch",
            "all microbatches of all replicas have weight 0",
            "leave such a batch out, or make loss_weight return more than 0",
        )
