"""Try on numbers whether microbatches add up to the batch: rows may meet inside the model."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from piper.capture import Captured
from piper.capture.python_state.function_caches import forgetting
from piper.capture.trace.trials.trial_draws import Kind
from piper.capture.trace.trials.trial_run import TrialRuns, in_type
from piper.errors import InputError, PiperError, first_line
from piper.job.batch.batch import Batch
from piper.job.batch.trial_batches import Variety, has_special, pairs_like
from piper.job.loss.comparison import Comparison, Shares, Verdict, shares_of
from piper.job.loss.kept_buffers import KeptBuffers
from piper.job.loss.loss_gradients import have_other_gradients
from piper.job.loss.loss_reduction import LossReduction, own_rows, unknown_lines
from piper.job.loss.lost_rows import is_beyond, refuse_lost_rows
from piper.job.loss.trial_messages import (
    gradients_of_loss_meet,
    not_finite_alone,
    rows_of_evaluation,
)
from piper.job.loss.trial_size import TrialSize, trial_size
from piper.job.loss.whole_batch import WholeBatch

LOG = logging.getLogger("piper")


@dataclass(frozen=True, slots=True)
class Draw:
    """A pair of random microbatches, of which a batch has so many, first those like the first one.

    Several, because one may be equal by chance.

    `backward`: also compare gradients, though no derivative is the user's own. `others`: if
    nothing differs, look for what other data would show. `kinds`: of random numbers, if any
    are drawn; `bits`: if these are bits only, as those of dropout.
    """

    seed: int
    variety: Variety
    kinds: tuple[Kind, ...]
    times: int = 2
    backward: bool = False
    others: bool = False
    bits: tuple[Kind, ...] = ()


EXTREME = (Kind.EXTREME_ROWS, Kind.EXTREME)
SIDES = (Variety.SMALL, Variety.LARGE)
SPECIAL = (Variety.CONSTANT, Variety.MARKED)
ASKING = (Variety.COMPARED, *SIDES, *SPECIAL)  # about what a model compares with
FEW = 12  # trials of special values: each tensor has each of some
NOT_FINITE = "its loss is not finite on random data"
ALONE = 4  # trials of one row twice beside another: each class of two single rows counts the same
PLAIN = 8  # so often plain numbers may show in few rows what they show in many
UNTRIED = (
    "on random data, the loss of microbatches could not be compared with that of a whole batch "
    "(%s); `piper check --numerics` compares a run with plain PyTorch"
)


@dataclass
class MicrobatchTrials:
    """One trial for each kind of microbatch. What it shows is said once, not for every length."""

    verdicts: dict[Hashable, Verdict] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

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
        try:
            found, seen = tried_sizes(runs, captured, one, reduction, said, batch)
        except PiperError:
            raise
        except Exception as error:  # of the model: it ran before, and does not run again
            what = f"{type(error).__name__} {first_line(error)}".rstrip()
            found, seen = Verdict(untried=what), frozenset()
        alone = min(batch.sizes) == 1  # random rows are often in order, if they are so few
        whole = found.times is not None and found.times == batch.times
        if not captured.meeting and not found.warnings and (alone or not whole):
            shown = frozenset() if alone else seen
            found = replace(found, warnings=tuple(batch.warnings(captured, whole, shown)))
        if found.warnings or is_beyond(found.untried):
            refuse_lost_rows(runs, batch.parts, batch.rows)
        self.verdicts[kind, batch.sizes] = found
        if found.untried and self.is_new(found.untried):
            unseen = reduction.is_guessed and runs.loss_fn is None  # only the user's word is left
            LOG.log(logging.WARNING if unseen else logging.INFO, UNTRIED, found.untried.rstrip("."))
        yield from filter(self.is_new, warnings(found, captured, reduction, said))
        kept = KeptBuffers(runs, batch.replicas, len(batch.sizes)).warnings(captured, one)
        yield from filter(self.is_new, kept)

    def warn_once(self, line: str) -> None:
        if self.is_new(line):
            self.warn(line)

    def warn(self, line: str) -> None:
        self.told.add(line)
        LOG.warning("%s", line)

    def warn_of_evaluation(self, where: str) -> None:
        """Rows that meet without gradients, unless training has said it of the same line."""
        if own_rows(where) not in self.told:
            self.warn_once(rows_of_evaluation(where))

    def is_new(self, line: str) -> bool:
        known = line in self.told
        self.told.add(line)
        return not known


def warnings(
    found: Verdict, captured: Captured, reduction: LossReduction, said: bool
) -> Iterator[str]:
    yield from () if captured.meeting else found.warnings
    if found.untried:
        yield from unknown_lines(reduction.form.unknown)
    elif not found.warnings and not said:  # on other data, these may be no means
        yield from unknown_lines([*filter(None, reduction.form.unknown)])


def tried_sizes(
    runs: TrialRuns,
    captured: Captured,
    one: Batch,
    reduction: LossReduction,
    said: bool,
    batch: WholeBatch,
) -> tuple[Verdict, frozenset[int]]:
    """What the first microbatch shows, or one of another size; and the sizes of which as many have
    shown what the whole batch does. A period of three rows is not seen in microbatches of three."""
    times, seen = len(batch.sizes), set[int]()
    first = tried(runs, captured, one, reduction, said, times)
    for other in (one, *batch.others(one)):
        found = first if other is one else tried(runs, captured, other, reduction, said, times)
        if found.warnings:
            return found, frozenset()
        if found.times == times:
            seen.add(other.rows or 0)
    return first, frozenset(seen)


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
        return of_loss_alone(runs, captured, one, reduction, "it would take seconds")
    if not size.is_whole:
        LOG.info("comparing the loss of microbatches with that of a whole batch, on %s", size)
    most = times if size.is_whole and size.takes(times) else 2
    found = shown_by(
        once(runs, one, size, reduction, said, draw) for draw in draws_of(size, captured, most)
    )
    if found != Verdict() and not found.untried:
        return found
    if not size.is_whole:
        return of_loss_alone(runs, captured, one, reduction, found.untried)
    return found if found.untried or said else replace(found, times=most)


def of_loss_alone(
    runs: TrialRuns, captured: Captured, one: Batch, reduction: LossReduction, untried: str
) -> Verdict:
    """What no trial has shown of a model that is too large for one with gradients. Where a loss is
    proved, they are as its value is."""
    guessed = reduction.form.kind is None
    if guessed and have_other_gradients(runs.loss_fn, captured.output, one, reduction):
        return Verdict((gradients_of_loss_meet(),))
    return Verdict(untried=untried)


def shown_by(trials: Iterable[Verdict]) -> Verdict:
    """The first that shows something. Some data may have no weight, and other data show it all."""
    untried = ""
    for one in trials:
        if one.warnings or (one != Verdict() and not one.untried):
            return one
        untried = one.untried or untried
    return Verdict(untried=untried)


def draws_of(size: TrialSize, captured: Captured, times: int) -> list[Draw]:
    others = not captured.meeting
    if not size.is_whole:
        free = Draw(3, Variety.FREE, EXTREME[:1], times, False, others, EXTREME[:1])
        return [free, Draw(1, Variety.WIDE, (), times)]
    every = (*Kind, *[Kind.PLAIN] * PLAIN * size.is_tiny)
    return [
        Draw(0, Variety.VARIED, (Kind.EXTREME,)),
        Draw(1, Variety.WIDE, (Kind.EXTREME_ROWS,), others=others),
        Draw(2, Variety.APART, ()),
        *[Draw(2, variety, ()) for variety in (Variety.ALIKE, Variety.EQUAL)],
        Draw(3, Variety.FREE, every, times, True, others, EXTREME),
        *[Draw(4 + k, Variety.COMPARED, ()) for k in range(1 + size.is_tiny)],
        *[Draw(0, variety, ()) for variety in SIDES],
        *[Draw(k, variety, ()) for variety in SPECIAL for k in range(FEW * size.is_tiny)],
        *[Draw(6 + k, Variety.WIDE, (), 3) for k in range(ALONE) if size.rows == 1 and times > 2],
    ]


def once(
    runs: TrialRuns,
    one: Batch,
    size: TrialSize,
    reduction: LossReduction,
    said: bool,
    draw: Draw,
) -> Verdict:
    """A trial on one pair of random microbatches."""
    if draw.variety in ASKING and not has_special(one, draw.variety, draw.seed, runs.comparisons):
        return Verdict()
    made = parts_and_whole(runs, size, one, reduction, draw)
    if isinstance(made, str):
        return Verdict(untried=made)
    found, together = made
    verdict = compared(found, together, reduction, said, draw) if found.is_finite else Verdict()
    kinds = draw.bits if found.draws_bits_only else draw.kinds
    for k, kind in enumerate(kinds) if verdict == Verdict() else ():
        orders = found.mixed(kind, 16 * draw.seed + k)
        verdict = with_mixed_numbers(orders, reduction, size.is_whole, said, draw)
        if verdict != Verdict():
            return verdict
    if not found.is_finite:
        lost = found.is_lost_in_parts and not (reduction.form.counts or found.whole.drawn)
        return Verdict((not_finite_alone(),)) if lost else Verdict(untried=NOT_FINITE)
    if verdict == Verdict() and draw.others:
        return found.judged_statistics(reduction, said)
    return verdict


def with_mixed_numbers(
    orders: Iterator[Comparison], reduction: LossReduction, is_whole: bool, said: bool, draw: Draw
) -> Verdict:
    """The same, where random numbers differ. Rows meet if they do for all orders among these."""
    found: list[Verdict | InputError] = []
    for one in orders:
        try:
            shares = known_shares(reduction, is_whole, one.pair, one.times, one.dtype)
            together = one.together(shares) if shares else None
            verdict = compared(one, together, reduction, said, replace(draw, backward=False))
        except InputError as error:
            found.append(error)
        else:
            if not verdict.warnings:
                return Verdict()
            found.append(verdict)
    first = found[0] if found else Verdict()
    if isinstance(first, InputError):
        raise first
    return first


def compared(
    found: Comparison, together: Tensor | None, reduction: LossReduction, said: bool, draw: Draw
) -> Verdict:
    if reduction.weight is not None and not found.rows_differ():
        return Verdict()  # the user's weights are not for random data
    if together is None and not (found.rows_differ() or found.rows_moved()):
        return Verdict()
    if together is not None and found.adds_up(together):
        vanishes = not found.same(together, found.whole.loss)  # then gradients say more
        return found.judged_types() or found.judged_backward(reduction, draw.backward or vanishes)
    seen = found.again(calls=True)
    if not seen.same(seen.whole.loss, found.whole.loss):
        return Verdict(untried="it gives other numbers when it runs again")
    return Verdict(tuple(seen.judged(reduction, together, said)))


def parts_and_whole(
    runs: TrialRuns, size: TrialSize, one: Batch, reduction: LossReduction, draw: Draw
) -> tuple[Comparison, Tensor | None] | str:
    """Both microbatches and the whole, in float64 if the model runs in it, and the loss of both
    together. Otherwise, why not."""
    why, other = "", None
    like = size.cut(one), size.rows, draw.variety, draw.seed, runs.comparisons
    for dtype, pair in ((t, pair) for t in (torch.float64, None) for pair in pairs_like(*like)):
        try:
            given = pair.map(partial(in_type, dtype=dtype)), draw.times, dtype
            shares = known_shares(reduction, size.is_whole, *given)  # before it runs for nothing
            made = Comparison.of(runs, *given, False, draw.backward, draw.others)
            together = made.together(shares) if shares else None
        except InputError as error:  # on these data, microbatches have no single weight
            why = str(error.problems[0].what)
            continue
        except Exception as error:  # whatever it is, there is no trial
            why = f"{type(error).__name__} {first_line(error)}".rstrip()
            continue
        if made.is_finite:
            return made, together
        tells = made.whole.drawn or made.is_lost_in_parts
        why, other = NOT_FINITE, other or ((made, together) if tells else None)
    if draw.backward:  # what fails may be only what a derivative needs
        return parts_and_whole(runs, size, one, reduction, replace(draw, backward=False))
    return other or why  # where random numbers differ, it may be finite


def known_shares(
    reduction: LossReduction, is_whole: bool, pair: Batch, times: int, dtype: torch.dtype | None
) -> Shares | None:
    """None if microbatches that are not whole are counted, or only the user knows what they weigh:
    his weights are for his data."""
    if reduction.form.counts and not is_whole:
        return None
    try:
        return shares_of(replace(reduction, weight=None), pair, times, dtype)
    except InputError:
        if reduction.weight is None:
            raise
        return None
