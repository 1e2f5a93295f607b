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


def gradients_of_loss_meet() -> str:
    return (
        "the gradients of the loss are no means or sums over rows, as in `a + b * (a / b).detach()`"
        ": each microbatch uses its own rows, as in a loop that accumulates gradients; detach what "
        "is of one row only, or use one microbatch and one replica to make them equal"
    )


def not_finite_alone() -> str:
    """Such as differences of neighbouring rows, of which one row has none."""
    return (
        "on random data, the loss is finite for a whole batch and not for a microbatch, so "
        "training would fail: it compares rows with each other, or needs more of them; use fewer "
        "microbatches, or one microbatch and one replica for the loss of the whole batch"
    )


def numbered_rows(where: str) -> str:
    """Such as the first eight rows of a batch, which are those of each microbatch, too."""
    at = f" at {where}" if where else ""
    return (
        f"the place of a row in its batch matters{at}: each microbatch counts its own rows, "
        "as in a loop that accumulates gradients, so the loss differs from that of one batch; give "
        "the batch a tensor that says it of each row, or use one microbatch and one replica"
    )


def rows_of_evaluation(where: str) -> str:
    return (
        f"in evaluation, rows of the batch meet at {where}: each microbatch uses its own rows, so "
        "evaluate and predict differ from one batch; use one microbatch and one replica to make "
        "them equal"
    )


def no_mean_over_rows(where: str) -> str:
    at = f" ({where})" if where else ""
    return (
        f"the model returns a number{at} that is no mean over the rows of its batch: {OWN_ROWS}; "
        "return one value for each row to make them equal"
    )


def no_plain_mean(once: float, twice: float) -> InputError:
    """A loss that the user calls a mean, and of which a part is a sum."""
    return InputError.of(
        "reduction",
        'it is "mean", but the loss has a sum or a norm over rows: on random data it is '
        f"{once:.4g} for some rows, and {twice:.4g} if each of them comes twice",
        "divide sums over rows by the number of rows, `x.sum() / len(x)`; if all of it is a sum, "
        'give reduction="sum"; if you want the mean of the microbatches anyway, '
        "loss_weight=lambda *microbatch: 1",
    )


def mean_of_parts(whole: float, together: float) -> str:
    return (
        f"the loss is no mean over rows: on random data it is {whole:.4g} for two microbatches "
        f'together, and {together:.4g} in their mean, which reduction="mean" asks for; use one '
        "microbatch and one replica to make them equal"
    )


def no_mean(whole: float, together: float, is_sum: bool) -> InputError:
    return InputError.of(
        "loss",
        f"on random data it is {whole:.4g} for two microbatches together, and {together:.4g} if "
        "Piper puts their losses together",
        no_mean_fix(is_sum),
    )
