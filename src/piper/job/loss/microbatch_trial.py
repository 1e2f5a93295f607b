"""Try on numbers whether microbatches add up to the batch: rows may meet inside the model."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from piper.capture import Captured
from piper.capture.python_state.function_caches import forgetting
from piper.capture.trace.trial_run import Trial, TrialRuns, gradients, in_type
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.batch.random_batches import drawn
from piper.job.batch.replica_batches import with_rows
from piper.job.loss.loss_reduction import (
    OWN_ROWS,
    LossReduction,
    growing_output,
    own_rows,
    unknown_lines,
)
from piper.job.loss.mean_loss_check import ROUNDING, no_mean_fix, no_sum
from piper.job.loss.rows_compared import (
    is_among,
    is_in_another_order,
    rows_apart,
    where_rows_meet,
)
from piper.job.loss.trial_size import TrialSize, trial_size
from piper.job.loss.whole_batch import WholeBatch

LOG = logging.getLogger("piper")
DRAWS = 3  # pairs of random microbatches: one may be equal by chance


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial shows: warnings, or why there was none."""

    warnings: tuple[str, ...] = ()
    untried: str = ""
    times: int | None = None  # so many microbatches were compared with a whole, and none differs


@dataclass(frozen=True, slots=True)
class Draw:
    """A pair of random microbatches, which a batch has in turn, so many times.

    `backward`: also compare gradients, though no derivative is the user's own.
    """

    seed: int
    times: int = 2
    backward: bool = False


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
        batch: WholeBatch,
    ) -> Iterator[str]:
        """Warnings that are new. Where rows are proved to meet, another one says so."""
        if (kind, batch.sizes) in self.verdicts:
            return
        found = tried(runs, captured, one, reduction, said, batch.times or 2)
        if not captured.meeting and not found.warnings and found.times != batch.times:
            found = replace(found, warnings=tuple(batch.warnings(captured)))
        self.verdicts[kind, batch.sizes] = found
        yield from () if captured.meeting else found.warnings
        if found.untried:
            LOG.info(UNTRIED, found.untried)
            yield from unknown_lines(reduction.form.unknown)
        elif not found.warnings and not said:  # on other data, these may be no means
            yield from unknown_lines([*filter(None, reduction.form.unknown)])


@forgetting()
def tried(
    runs: TrialRuns,
    captured: Captured,
    one: Batch,
    reduction: LossReduction,
    said: bool,
    times: int,
) -> Verdict:
    """Compare the loss of two random microbatches like this one with that of both together, and
    with a batch of so many `times` a microbatch, if that is small.

    Raises an error if these differ for another reason than rows that meet. `said`: the user says
    how losses are put together, so only rows count.
    """
    size = trial_size(captured, one)
    if size is None:
        return Verdict(untried="it would take seconds")
    if not size.is_whole:
        LOG.info("comparing the loss of microbatches with that of a whole batch, on %s", size)
    most = times if size.is_whole and size.takes(times) else 2
    draws = [Draw(seed) for seed in range(DRAWS - 1)] if size.is_whole else []
    draws.append(Draw(DRAWS, most, backward=size.is_whole))
    found = (once(runs, one, size, reduction, said, draw) for draw in draws)
    done = Verdict(times=most if size.is_whole and not said else None)
    return next((verdict for verdict in found if verdict != Verdict()), done)


def once(
    runs: TrialRuns,
    one: Batch,
    size: TrialSize,
    reduction: LossReduction,
    said: bool,
    draw: Draw,
) -> Verdict:
    """A trial on one pair of random microbatches."""
    found = parts_and_whole(runs, size.cut(one), size.rows, draw)
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
        return found.judged_types() or found.judged_backward(reduction, draw.backward)
    seen = found.again(calls=True)
    if not seen.same(seen.whole.loss, found.whole.loss):
        return Verdict(untried="it gives other numbers when it runs again")
    return Verdict(tuple(seen.judged(reduction, together, said)))


def parts_and_whole(runs: TrialRuns, one: Batch, rows: int, draw: Draw) -> Comparison | str:
    """Both microbatches and the whole, in float64 if the model runs in it. Otherwise, why not."""
    why = ""
    for dtype, varied in product((torch.float64, None), (True, False)):
        try:
            pair = two_like(one, rows, varied, draw.seed)
            made = Comparison.of(runs, pair, draw.times, dtype, derived=draw.backward)
        except Exception as error:  # whatever it is, there is no trial
            why = f"{type(error).__name__} {str(error).partition(chr(10))[0]}".rstrip()
            continue
        if made.is_finite:
            return made
        why = "its loss is not finite on random data"
    if draw.backward:  # what fails may be only what a derivative needs
        return parts_and_whole(runs, one, rows, replace(draw, backward=False))
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


def in_turn(pair: Batch, times: int) -> Batch:
    """So many microbatches: those of a pair, in turn."""
    return with_rows(pair, times * ((pair.rows or 0) // 2)) if times != 2 else pair


@dataclass(frozen=True)
class Comparison:
    """A whole batch of so many microbatches: the two of a pair, in turn."""

    runs: TrialRuns
    pair: Batch
    times: int
    dtype: torch.dtype | None
    whole: Trial
    halves: tuple[Trial, Trial]

    @staticmethod
    def of(
        runs: TrialRuns,
        pair: Batch,
        times: int,
        dtype: torch.dtype | None,
        calls: bool = False,
        derived: bool = False,
    ) -> Comparison:
        pair = pair.map(lambda tensor: in_type(tensor, dtype))
        parts = (in_turn(pair, times), *pair.parts(2))
        whole, one, other = (runs.run(part.arguments, dtype, calls, derived) for part in parts)
        return Comparison(runs, pair, times, dtype, whole, (one, other))

    def again(self, calls: bool = False, derived: bool = False) -> Comparison:
        return Comparison.of(self.runs, self.pair, self.times, self.dtype, calls, derived)

    @property
    def batch(self) -> Batch:
        return in_turn(self.pair, self.times)

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
        """The loss of all microbatches, as Piper puts them together.

        None if it depends on what they count: that is known for whole microbatches only.
        """
        if reduction.form.counts and not is_whole:
            return None
        pairs = zip(self.shares(reduction), self.halves, strict=True)
        return torch.stack([share * one.loss.double().sum() for share, one in pairs]).sum()

    def shares(self, reduction: LossReduction) -> tuple[float, float]:
        """Of the first of the pair and of the second, each as often as it comes."""
        own = reduction.weights(self.batch, self.times)
        shares = reduction.shares(own, sum(own))
        return sum(shares[::2]), sum(shares[1::2])

    def judged_types(self) -> Verdict | None:
        """Results are rounded to the same types, which the trial itself does not do."""
        found = [one.rounded for one in (self.whole, *self.halves)]
        every = {kind: line for one in reversed(found) for kind, line in one.items()}
        apart = [line for kind, line in every.items() if any(kind not in one for one in found)]
        return Verdict((own_rows(apart[0]),)) if apart else None

    def judged_backward(self, reduction: LossReduction, wanted: bool) -> Verdict:
        """The loss adds up. Gradients do, too, unless the user's own derivatives mix rows, or a
        value is detached for some numbers of rows only."""
        lines = self.whole.own_derivatives
        if not (lines or wanted) or not self.runs.trained:
            return Verdict()
        try:
            made = self if self.whole.graph else self.again(derived=True)
            pairs = zip((made.whole, *made.halves), (1.0, *self.shares(reduction)), strict=True)
            found = [gradients(one, factor) for one, factor in pairs]
        except Exception as error:  # whatever it is, there is no trial
            return Verdict(untried=f"{type(error).__name__} in its backward")
        if self.same(found[0], found[1] + found[2]) or not found[0].isfinite().all():
            return Verdict()
        return Verdict((gradients_meet(", ".join(dict.fromkeys(filter(None, lines)))),))

    def judged(
        self, reduction: LossReduction, together: Tensor | None, said: bool
    ) -> Iterator[str]:
        """Warnings. What differs is rows, a number that the model returns, or else the loss."""
        how = self.times, self.tolerance
        lines = (where_rows_meet(self.whole.calls, one.calls, *how) for one in self.halves)
        where = next(filter(None, lines), "")
        if self.rows_differ() or self.rows_moved() or (self.is_own_loss and where):
            yield own_rows(where or self.where_rows_move())
            return
        if together is None or reduction.weight is not None:
            return
        if reduction.kind == "sum":
            raise no_sum(float(self.whole.loss), float(together))
        if said:
            return
        numbers = [] if self.is_own_loss else list(self.numbers(reduction.form.sums))
        if not numbers:
            raise no_mean(float(self.whole.loss), float(together), self.is_sum())
        yield from numbers

    def is_sum(self) -> bool:
        """Whether the loss of the whole is the sum of those of its parts."""
        first, second = (one.loss.double() for one in self.halves)
        often = self.times // 2
        return self.same(self.whole.loss, (self.times - often) * first + often * second)

    @property
    def is_own_loss(self) -> bool:
        return self.runs.loss_fn is None

    def rows_differ(self) -> bool:
        """Whether a row of the output of a half is no row of the output of the whole."""
        return any(
            rows_apart(whole, half, self.times, self.tolerance)
            for one in self.halves
            for whole, half in zip(self.whole.output, one.output, strict=True)
        )

    def rows_moved(self) -> bool:
        """Whether rows depend on the others for their place, as if sorted. Labels do not move."""
        return any(
            is_in_another_order(whole, one, other, self.times, self.tolerance)
            for whole, one, other in self.outputs
        )

    def where_rows_move(self) -> str:
        """The line whose result is in another order, and what it read is not."""
        calls = [one.calls for one in (self.whole, *self.halves)]
        if len({tuple(result.line for result in one) for one in calls}) > 1:
            return ""
        moved = [
            is_in_another_order(whole.tensor, one.tensor, other.tensor, self.times, self.tolerance)
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
            total = one.double() * (self.times - self.times // 2)
            total += other.double() * (self.times // 2)
            if self.same(whole, total / self.times):
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


def no_mean(whole: float, together: float, is_sum: bool) -> InputError:
    return InputError.of(
        "loss",
        f"on random data it is {whole:.4g} for two microbatches together, and {together:.4g} if "
        "Piper puts their losses together",
        no_mean_fix(is_sum),
    )
