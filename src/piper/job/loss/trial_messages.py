"""What a trial of microbatches tells the user."""

from __future__ import annotations

from piper.errors import InputError
from piper.job.loss.loss_reduction import OWN_ROWS
from piper.job.loss.mean_loss_check import no_mean_fix


def gradients_meet(where: str) -> str:
    at = f", in the backward of your own functions ({where})" if where else ""
    return (
        "the gradients of rows depend on other rows of the batch, or on their number"
        f"{at}: each microbatch uses its own rows, as in a loop that "
        "accumulates gradients; use one microbatch and one replica to make them equal"
    )


def no_mean_over_rows(where: str) -> str:
    at = f" ({where})" if where else ""
    return (
        f"the model returns a number{at} that is no mean over the rows of its batch: {OWN_ROWS}; "
        "return one value for each row to make them equal"
    )


def bent(where: str) -> InputError:
    return InputError.of(
        "loss",
        f"it is no mean or sum over rows: what it computes from all of them at {where} is compared "
        "or cut off, or divides. On random data this makes no difference, on others it does",
        "make it one value for each row, and take the mean of these at the end; if you want the "
        "mean of the microbatches anyway, give the Trainer loss_weight=lambda *microbatch: 1",
    )


def no_mean(whole: float, together: float, is_sum: bool) -> InputError:
    return InputError.of(
        "loss",
        f"on random data it is {whole:.4g} for two microbatches together, and {together:.4g} if "
        "Piper puts their losses together",
        no_mean_fix(is_sum),
    )
