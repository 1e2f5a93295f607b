"""Try on numbers whether microbatches add up to the batch: rows may meet inside the model."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from piper.capture import Captured
from piper.capture.trace.trial_run import Result, Trial, TrialRuns, in_type
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.batch.random_batches import drawn
from piper.job.loss.loss_reduction import (
    OWN_ROWS,
    LossReduction,
    growing_output,
    own_rows,
    unknown_lines,
)
from piper.job.loss.mean_loss_check import ROUNDING
from piper.job.loss.trial_size import TrialSize, trial_size

LOG = logging.getLogger("piper")
DRAWS = 3  # pairs of random microbatches: one may be equal by chance


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial shows: warnings, or why there was none."""

    warnings: tuple[str, ...] = ()
    untried: str = ""


UNTRIED = (
    "no trial of microbatches against a whole batch (%s); `piper check --numerics` compares a run "
    "with plain PyTorch"
)


@dataclass
class MicrobatchTrials:
    """One trial for each kind of microbatch."""

    verdicts: dict[Hashable, Verdict] = field(default_factory=dict)

    def lines(
        self,
        kind: Hashable,
        runs: TrialRuns,
        captured: Captured,
        one: Batch,
        reduction: LossReduction,
        said: bool,
    ) -> Iterator[str]:
        """Warnings that are new. Where rows are proved to meet, another one says so."""
        if kind in self.verdicts:
            return
        found = self.verdicts[kind] = tried(runs, captured, one, reduction, said)
        yield from () if captured.meeting else found.warnings
        if found.untried:
            LOG.info(UNTRIED, found.untried)
            yield from unknown_lines(reduction.form.unknown)
        elif not found.warnings and not said:  # on other data, these may be no means
            yield from unknown_lines([*filter(None, reduction.form.unknown)])


def tried(
    runs: TrialRuns,
    captured: Captured,
    one: Batch,
    reduction: LossReduction,
    said: bool,
) -> Verdict:
    """Compare the loss of two random microbatches like this one with that of both together.

    Raises an error if these differ for another reason than rows that meet. `said`: the user says
    how losses are put together, so only rows count.
    """
    size = trial_size(captured, one)
    if size is None:
        return Verdict(untried="it would take seconds")
    if not size.is_whole:
        LOG.info("comparing the loss of microbatches with that of a whole batch, on %s", size)
    draws = range(DRAWS if size.is_whole else 1)
    found = (once(runs, one, size, reduction, said, seed) for seed in draws)
    return next((verdict for verdict in found if verdict != Verdict()), Verdict())


def once(
    runs: TrialRuns, one: Batch, size: TrialSize, reduction: LossReduction, said: bool, seed: int
) -> Verdict:
    """A trial on one pair of random microbatches."""
    found = halves_and_whole(runs, size.cut(one), size.rows, seed)
    if isinstance(found, str):
        return Verdict(untried=found)
    if reduction.weight is not None and not found.rows_differ():
        return Verdict()  # the user's weights are not for random data
    try:
        together = found.together(replace(reduction, weight=None), size.is_whole)
    except InputError as error:  # on these data, microbatches have no single weight
        return Verdict(untried=str(error.problems[0].what))
    if together is None and not (found.rows_differ() or found.rows_moved()):
        return Verdict()
    if together is not None and found.same(together, found.whole.loss):
        return found.judged_backward(reduction)
    seen = found.with_calls()
    if not seen.same(seen.whole.loss, found.whole.loss):
        return Verdict(untried="it gives other numbers when it runs again")
    return Verdict(tuple(seen.judged(reduction, together, said)))


def halves_and_whole(runs: TrialRuns, one: Batch, rows: int, seed: int) -> Comparison | str:
    """Both microbatches and the whole, in float64 if the model runs in it. Otherwise, why not."""
    why = ""
    for dtype, varied in product((torch.float64, None), (True, False)):
        try:
            made = Comparison.of(runs, two_like(one, rows, varied, seed), dtype, calls=False)
        except Exception as error:  # whatever it is, there is no trial
            why = f"{type(error).__name__} {str(error).partition(chr(10))[0]}".rstrip()
            continue
        if made.is_finite:
            return made
        why = "its loss is not finite on random data"
    return why


def two_like(one: Batch, rows: int, varied: bool, seed: int) -> Batch:
    """Twice so many rows, at random. `varied`: also integers of which the example has only one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(seen: Tensor) -> Tensor:
        seen, shape = seen.detach().cpu(), (2 * rows, *seen.shape[1:])
        found = drawn(seen, shape, generator)
        constant = seen.numel() and not seen.is_floating_point() and seen.min() == seen.max() >= 0
        if varied and constant and seen.dtype is not torch.bool:
            found = found + torch.randint(0, 2, shape, generator=generator).to(seen.dtype)
        return found

    return one.change_rows(draw).map(lambda tensor: tensor.cpu())


@dataclass(frozen=True)
class Comparison:
    """A whole batch, and its two halves."""

    runs: TrialRuns
    batch: Batch
    dtype: torch.dtype | None
    whole: Trial
    halves: tuple[Trial, Trial]

    @staticmethod
    def of(runs: TrialRuns, batch: Batch, dtype: torch.dtype | None, calls: bool) -> Comparison:
        batch = batch.map(lambda tensor: in_type(tensor, dtype))
        parts = (batch, *batch.parts(2))
        whole, one, other = (runs.run(part.arguments, dtype, calls) for part in parts)
        return Comparison(runs, batch, dtype, whole, (one, other))

    def with_calls(self) -> Comparison:
        return Comparison.of(self.runs, self.batch, self.dtype, calls=True)

    @property
    def is_finite(self) -> bool:
        return all(bool(one.loss.isfinite().all()) for one in (self.whole, *self.halves))

    @property
    def tolerance(self) -> float:
        """What rounding in the coarsest type explains, relative to the largest number."""
        return ROUNDING[self.whole.coarsest]

    def same(self, one: Tensor, other: Tensor) -> bool:
        a, b = one.double().flatten(), other.double().flatten()
        return one.numel() == other.numel() and is_among(a[None], b[None], self.tolerance)

    def together(self, reduction: LossReduction, is_whole: bool) -> Tensor | None:
        """The loss of both halves, as Piper puts them together.

        None if it depends on what halves count: that is known for whole microbatches only.
        """
        if reduction.form.counts and not is_whole:
            return None
        pairs = zip(self.shares(reduction), self.halves, strict=True)
        return torch.stack([share * one.loss.double().sum() for share, one in pairs]).sum()

    def shares(self, reduction: LossReduction) -> tuple[float, ...]:
        own = reduction.weights(self.batch, 2)
        return reduction.shares(own, sum(own))

    def judged_backward(self, reduction: LossReduction) -> Verdict:
        """The loss adds up. Gradients do, too, unless the user's own derivatives mix rows."""
        lines = self.whole.own_derivatives
        if not lines:
            return Verdict()
        parts = zip((self.batch, *self.batch.parts(2)), (1.0, *self.shares(reduction)), strict=True)
        try:
            found = [self.runs.gradients(one.arguments, self.dtype, f) for one, f in parts]
        except Exception as error:  # whatever it is, there is no trial
            return Verdict(untried=f"{type(error).__name__} in its backward")
        if self.same(found[0], found[1] + found[2]):
            return Verdict()
        return Verdict((gradients_meet(", ".join(dict.fromkeys(filter(None, lines)))),))

    def judged(
        self, reduction: LossReduction, together: Tensor | None, said: bool
    ) -> Iterator[str]:
        """Warnings. What differs is rows, a number that the model returns, or else the loss."""
        lines = (where_rows_meet(self.whole.calls, h.calls, self.tolerance) for h in self.halves)
        where = next(filter(None, lines), "")
        if self.rows_differ() or self.rows_moved() or (self.is_own_loss and where):
            yield own_rows(where or self.where_rows_move())
            return
        if said or together is None:
            return
        numbers = [] if self.is_own_loss else list(self.numbers(reduction.form.sums))
        if not numbers:
            raise no_sum(float(self.whole.loss), float(together))
        yield from numbers

    @property
    def is_own_loss(self) -> bool:
        return self.runs.loss_fn is None

    def rows_differ(self) -> bool:
        """Whether a row of the output of a half is no row of the output of the whole."""
        return any(
            rows_apart(whole, half, self.tolerance)
            for one in self.halves
            for whole, half in zip(self.whole.output, one.output, strict=True)
        )

    def rows_moved(self) -> bool:
        """Whether rows depend on the others for their place, as if sorted. Labels do not move."""
        return any(
            is_in_another_order(whole, one, other, self.tolerance)
            for whole, one, other in self.outputs
        )

    def where_rows_move(self) -> str:
        """The line whose result is in another order, and what it read is not."""
        calls = [one.calls for one in (self.whole, *self.halves)]
        if len({tuple(result.line for result in one) for one in calls}) > 1:
            return ""
        moved = [
            is_in_another_order(whole.tensor, one.tensor, other.tensor, self.tolerance)
            for whole, one, other in zip(*calls, strict=True)
        ]
        results = list(zip(self.whole.calls, moved, strict=True))
        found = (r.line for r, own in results if own and not any(moved[k] for k in r.inputs))
        return next(found, "")

    @property
    def outputs(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of the whole and of both halves."""
        return list(zip(self.whole.output, *(half.output for half in self.halves), strict=True))

    def numbers(self, sums: Sequence[int]) -> Iterator[str]:
        """Outputs without rows that are no means over rows. Those in `sums` are known."""
        for position, (whole, one, other) in enumerate(self.outputs):
            if whole.shape != one.shape or position in sums:
                continue
            total = one.double() + other.double()
            if self.same(whole, total / 2):
                continue
            where = self.line_of(whole)
            if self.same(whole, total):
                raise growing_output(where or "Piper does not see where")
            yield no_mean_over_rows(where)

    def line_of(self, output: Tensor) -> str:
        """The last line that gave this tensor."""
        found = (
            one.line
            for one in reversed(self.whole.calls)
            if one.tensor.shape == output.shape and torch.equal(one.tensor, output)
        )
        return next(found, "")


def where_rows_meet(whole: Sequence[Result], half: Sequence[Result], tolerance: float) -> str:
    """The first line whose result for a half is no part of its result for the whole."""
    if [one.line for one in whole] != [one.line for one in half]:  # as in a loop over rows
        whole, half = last_of_each_line(whole), last_of_each_line(half)
    pairs = zip(whole, half, strict=False)
    apart = (a.line for a, b in pairs if rows_apart(a.tensor, b.tensor, tolerance))
    return next(apart, "")


def last_of_each_line(results: Sequence[Result]) -> list[Result]:
    """In the order in which they first ran."""
    return list({one.line: one for one in results}.values())


def rows_apart(whole: Tensor, half: Tensor, tolerance: float) -> bool:
    """Whether a row of one tensor is missing in the other, which has twice as many rows."""
    dim = growing(whole, half)
    if dim is None:
        return False
    some, rows = (plain(one.movedim(dim, 0)) for one in (half, whole))
    return not is_among(some, rows, tolerance)


def is_in_another_order(whole: Tensor, one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether the rows of both halves, one after the other, are not those of the whole."""
    dim = growing(whole, one)
    if dim is None or one.shape != other.shape:
        return False
    joined, rows = (plain(t.movedim(dim, 0)) for t in (torch.cat([one, other], dim), whole))
    return not is_among(joined.reshape(1, -1), rows.reshape(1, -1), tolerance)


def growing(whole: Tensor, half: Tensor) -> int | None:
    """The dimension of rows, of which one tensor has twice as many."""
    if whole.dim() != half.dim() or whole.dtype is torch.bool or not half.numel():
        return None
    pairs = list(zip(whole.shape, half.shape, strict=True))
    grows = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    return (
        grows[0] if len(grows) == 1 and whole.shape[grows[0]] == 2 * half.shape[grows[0]] else None
    )


def plain(tensor: Tensor) -> Tensor:
    """Rows of real and finite numbers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.double().reshape(len(tensor), -1).nan_to_num(0.0, 1.0, -1.0)


def is_among(some: Tensor, rows: Tensor, tolerance: float) -> bool:
    """Whether each of some rows is one of the others, up to rounding."""
    size = float(max(some.abs().max(), rows.abs().max())) if some.numel() else 0.0
    apart = torch.cdist(some[None], rows[None], p=float("inf"))[0]
    return bool((apart.amin(1) <= tolerance * size).all())


def gradients_meet(where: str) -> str:
    at = f" ({where})" if where else ""
    return (
        "the gradients of rows depend on other rows of the batch, or on their number, in the "
        f"backward of your own functions{at}: each microbatch uses its own rows, as in a loop that "
        "accumulates gradients; use one microbatch and one replica to make them equal"
    )


def no_mean_over_rows(where: str) -> str:
    at = f" ({where})" if where else ""
    return (
        f"the model returns a number{at} that is no mean over the rows of its batch: {OWN_ROWS}; "
        "return one value for each row to make them equal"
    )


def no_sum(whole: float, together: float) -> InputError:
    return InputError.of(
        "loss",
        f"on random data it is {whole:.4g} for two microbatches together, and {together:.4g} if "
        "Piper puts their losses together",
        'if it is a sum, give the Trainer reduction="sum"; if rows have different weights, '
        "loss_weight=lambda *microbatch: the weight of its rows; if you want the mean of the "
        "microbatches anyway, loss_weight=lambda *microbatch: 1",
    )
