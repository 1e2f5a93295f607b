"""A whole batch on numbers, beside its microbatches: what differs, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import torch
from torch import Tensor

from piper.capture.trace.trials.trial_draws import Kind, Layout, MixedNumbers, layouts
from piper.capture.trace.trials.trial_run import (
    Trial,
    TrialRuns,
    computing_in,
    gradients,
)
from piper.job.batch.batch import Batch
from piper.job.batch.replica_batches import with_rows
from piper.job.loss.loss_reduction import (
    LossReduction,
    bent,
    growing_output,
    own_rows,
    refuse_weightless,
)
from piper.job.loss.mean_loss_check import ROUNDING, no_sum
from piper.job.loss.other_statistics import OtherStatistics
from piper.job.loss.rows_compared import (
    is_among,
    is_in_another_order,
    repeats,
    rows_apart,
    where_rows_meet,
)
from piper.job.loss.summed_sizes import rounding_of
from piper.job.loss.trial_messages import (
    gradients_meet,
    mean_of_parts,
    no_mean,
    no_mean_over_rows,
    no_plain_mean,
)

Shares = tuple[float, float]


MOST_ORDERS = 3  # sizes of draws that may be in either order, each by itself
GROWING = 1.3  # a logarithm grows by the same each time, a root by 1.4 times, and a sum by twice


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial shows: warnings, or why there was none."""

    warnings: tuple[str, ...] = ()
    untried: str = ""
    times: int | None = None  # so many microbatches were compared with a whole, and none differs


def orders_of(draws: Sequence[Layout], rows: int) -> list[frozenset[tuple[int, ...]]]:
    """Which sizes of draws may have all rows in turn: none, all, or some of a few.

    Those with one element for each row, along a dimension, have one order.
    """
    several = [one.shape for one in draws if one.dim is not None and one.shape[one.dim] > rows]
    sizes = list(dict.fromkeys(several))
    few = sizes[:MOST_ORDERS]
    some = (combinations(few, count) for count in range(1, len(few)))
    found = [(), sizes, *chain.from_iterable(some)]
    return [frozenset(one) for one in (found if sizes else found[:1])]


def repeated(pair: Batch, times: int) -> Batch:
    """So many microbatches: the first of a pair again and again, and then the second.

    In turn, they would look the same to code that reads the first rows, or compares distant ones.
    """
    if times == 2:
        return pair
    often, rows = repeats(times), (pair.rows or 0) // 2

    def each(tensor: Tensor) -> Tensor:
        halves = zip(tensor.split(rows), often, strict=True)
        return torch.cat([half for half, count in halves for _ in range(count)])

    return pair.change_rows(each)


def shares_of(
    reduction: LossReduction, pair: Batch, times: int, dtype: torch.dtype | None
) -> Shares:
    """What the first of a pair and the second count in the loss, each as often as it comes."""
    with computing_in(dtype):  # `mask.sum() + 1e-8` is rounded as in the loss
        own = reduction.weights(repeated(pair, times), times)
        refuse_weightless(sum(own))
        shares = reduction.shares(own, sum(own))
    first, _ = repeats(times)
    return sum(shares[:first]), sum(shares[first:])


@dataclass(frozen=True)
class Comparison:
    """A whole batch of so many microbatches like the two of a pair."""

    runs: TrialRuns
    pair: Batch
    times: int
    dtype: torch.dtype | None
    whole: Trial
    halves: tuple[Trial, Trial]
    draws: MixedNumbers | None = None  # None: all random numbers are the same

    @staticmethod
    def of(
        runs: TrialRuns,
        pair: Batch,
        times: int,
        dtype: torch.dtype | None,
        calls: bool = False,
        derived: bool = False,
        sizes: bool = False,
        draws: MixedNumbers | None = None,
    ) -> Comparison:
        parts = (repeated(pair, times), *pair.parts(2))
        own = [draws and replace(draws, part=part) for part in (None, 0, 1)]
        how = dtype, calls, derived, sizes, None
        given = zip(parts, own, strict=True)
        whole, one, other = (runs.run(part.arguments, *how, numbers) for part, numbers in given)
        return Comparison(runs, pair, times, dtype, whole, (one, other), draws)

    def again(self, calls: bool = False, derived: bool = False) -> Comparison:
        given = self.runs, self.pair, self.times, self.dtype, calls, derived
        return Comparison.of(*given, draws=self.draws)

    def mixed(self, kind: Kind, seed: int) -> Iterator[Comparison]:
        """The pair with mixed random numbers, if it draws any, for each order that rows may have
        among them. None if the model gives no numbers with these."""
        first, second = (one.drawn for one in self.halves)
        found, rows = (
            layouts(self.whole.drawn, first, second, self.times),
            (self.pair.rows or 0) // 2,
        )
        for minor in orders_of(found, rows) if found else ():
            draws = MixedNumbers(found, None, 2, seed, kind, minor, rows)
            try:
                made = Comparison.of(self.runs, self.pair, 2, self.dtype, draws=draws)
            except Exception:  # whatever it is, there is no trial
                return
            if made.is_finite:
                yield made

    @property
    def draws_bits_only(self) -> bool:
        return all(one.bits for one in self.whole.drawn)

    @property
    def is_finite(self) -> bool:
        return all(bool(one.loss.isfinite().all()) for one in (self.whole, *self.halves))

    @property
    def is_lost_in_parts(self) -> bool:
        """Whether the loss is a number for the whole only: a part has too few rows for it."""
        whole, *parts = (bool(one.loss.isfinite().all()) for one in (self.whole, *self.halves))
        return whole and not any(parts)

    @property
    def tolerance(self) -> float:
        """What rounding in the coarsest type explains, relative to the largest number."""
        return ROUNDING[self.whole.coarsest]

    def same(self, one: Tensor, other: Tensor) -> bool:
        a, b = one.double().flatten(), other.double().flatten()
        return one.numel() == other.numel() and is_among(a[None], b[None], self.tolerance)

    def adds_up(self, together: Tensor) -> bool:
        """Whether the loss of the whole is that of its parts, up to rounding of what it sums."""
        whole = self.whole.loss
        if self.same(together, whole):
            return True
        runs = (seen := self.again(calls=True)).whole, *seen.halves
        limit = sum(rounding_of(one.calls, one.loss, self.whole.coarsest) for one in runs)
        return abs(float(together) - float(whole.double())) <= limit

    def together(self, shares: Shares) -> Tensor:
        """The loss of all microbatches, as Piper puts them together."""
        pairs = zip(shares, self.halves, strict=True)
        return torch.stack([share * one.loss.double().sum() for share, one in pairs]).sum()

    def shares(self, reduction: LossReduction) -> Shares:
        return shares_of(reduction, self.pair, self.times, self.dtype)

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
            often, factors = (1, *repeats(self.times)), (1.0, *self.shares(reduction))
            each = zip((made.whole, *made.halves), factors, often, strict=True)
            # A backward of the user need not be linear: each microbatch has its own share.
            found = [many * gradients(one, factor / many) for one, factor, many in each]
        except Exception as error:  # whatever it is, there is no trial
            return Verdict(untried=f"{type(error).__name__} in its backward")
        if self.same(found[0], found[1] + found[2]) or not found[0].isfinite().all():
            return Verdict()
        return Verdict((gradients_meet(", ".join(dict.fromkeys(filter(None, lines)))),))

    def judged_statistics(self, reduction: LossReduction, said: bool) -> Verdict:
        """All is equal here. It may not be for data on which all rows give another value."""
        one = self.pair.parts(2)[0]
        given = self.runs, self.whole, self.halves[0], one, self.times, self.dtype, self.tolerance
        others = OtherStatistics(*given)
        if (where := others.line_of_rows()) is not None:
            return Verdict((own_rows(where),))
        trusted = said and reduction.kind == "mean"
        guessed = reduction.is_guessed and not trusted and not self.is_own_loss
        if guessed and (where := others.line_of_loss()) is not None:
            raise bent(where)
        return Verdict()

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
            self.refuse_growing()
            yield mean_of_parts(float(self.whole.loss), float(together))
            return
        numbers = [] if self.is_own_loss else list(self.numbers(reduction.form.sums))
        if not numbers:
            raise no_mean(float(self.whole.loss), float(together), self.is_sum())
        yield from numbers

    def refuse_growing(self) -> None:
        """A loss that the user calls a mean: rows that come twice do not change one.

        That of a root or of the largest row stays the same, too. It grows by a little if rows are
        compared with each other, as often as they are doubled, and by ever more if it is a sum.
        """
        one = self.pair.parts(2)[0]
        often = [with_rows(one, times * (one.rows or 0)) for times in (1, 2, 4)]
        try:
            found = [self.runs.run(each.arguments, self.dtype, False) for each in often]
        except Exception:  # it does not run with so many
            return
        once, twice, four = (float(each.loss) for each in found)
        first, second = twice - once, four - twice
        size = max(map(abs, (once, twice, four)))
        if abs(first) > 1e3 * self.tolerance * size and second / first > GROWING:
            raise no_plain_mean(once, twice)

    def is_sum(self) -> bool:
        """Whether the loss of the whole is the sum of those of its parts."""
        first, second = (one.loss.double() for one in self.halves)
        once, again = repeats(self.times)
        return self.same(self.whole.loss, once * first + again * second)

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
            first, second = repeats(self.times)
            total = one.double() * first + other.double() * second
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
