"""Losses that no test on numbers can judge."""

from __future__ import annotations

from piper.errors import InputError
from piper.job.loss.loss_reduction import COMPARED, Reduction


def raise_untestable(kind: Reduction, why: str) -> None:
    """If the user says that a loss is a sum, nothing speaks against it."""
    if kind == "mean":
        raise untestable(why)


def untestable(why: str) -> InputError:
    return InputError.of(
        "loss",
        "Piper cannot see in its graph that it is a mean over rows, and cannot test it on random "
        f"outputs: {why}",
        f"{COMPARED}; if you want the mean of the microbatches, give the Trainer "
        'loss_weight=lambda *microbatch: 1; if it is a sum, reduction="sum"',
    )
