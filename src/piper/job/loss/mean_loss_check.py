"""Test on numbers whether a loss is a mean or sum over samples, where its graph proves nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch

from piper.capture.loss import LossForm
from piper.capture.trace.arguments.call_arguments import as_given
from piper.capture.trace.trials.comparisons import Comparing, Comparisons
from piper.capture.tracing_private import unchecked_distributions
from piper.errors import InputError, first_line
from piper.job.batch.batch import Batch
from piper.job.loss.counted_labels import has_ids, times_counted, weigh_by_counted
from piper.job.loss.loss_reduction import COMPARED, Reduction
from piper.job.loss.random_labels import SPECIAL, Change, changed
from piper.job.loss.random_outputs import (
    MeanOfRows,
    Output,
    SumOfRows,
    Unbatched,
    cut,
    drawn_integers,
    has_integers,
    interpretations,
    is_batched,
    is_tensor,
    like,
    most_rows,
    small,
    thinned,
)
from piper.job.loss.untestable import raise_untestable
from piper.runtime.batch import part_of
from piper.runtime.torch_private import pytree

NEAR = 3  # the trial in which outputs of the first half are small, as their labels are
UNKNOWN = LossForm()
LONGEST = 200  # characters of an error that is shown
ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def refuse_no_mean(
    loss_fn: Callable[..., Any] | None,
    output: Output,
    batch: Batch,
    samples: int,
    kind: Reduction = "mean",
    form: LossForm = UNKNOWN,
) -> None:
    """Evaluate the loss on random outputs and the labels of the batch: on some samples, and on the
    two halves of them; for several draws, and also with the labels of one half erased.

    `output`: what the model returns for so many `samples`. A loss that is not the mean of its
    halves, or cannot be evaluated like this, is an error. So is one of outputs without rows: their
    halves would be the same. `kind`: if the user says that it is a sum, it must be that of its
    halves, as far as it can be evaluated. `form`: what is known of outputs.
    """
    if loss_fn is None:
        return
    if any(not isinstance(size, int) for leaf in output[0] if is_tensor(leaf) for size in leaf[0]):
        raise_untestable(kind, "a size of an output of the model depends on values")
        return
    own, output, labels = prepared(loss_fn, output, batch, form)
    if not any(is_batched(leaf, samples) for leaf in output[0]):
        raise_untestable(kind, "no output of the model has rows")
        return
    with torch.random.fork_rng(devices=[]):  # do not change the user's random state
        found = [outcomes(own, one, labels, samples) for one in interpretations(output, samples)]
    worst = [max(seen, key=partial(Outcome.apart, kind=kind), default=None) for seen, _ in found]
    if any(one is not None and one.apart(kind) <= 1.0 for one in worst):
        return
    known = next((one for one in worst if one is not None), None)
    if known is None:
        raise_untestable(kind, found[0][1])
        return
    is_sum = all(one.apart("sum") <= 1.0 for seen, _ in found for one in seen)
    if kind == "sum":
        raise no_sum(known.whole, 2 * known.mean)
    if is_counted(own, output, labels, samples):
        raise no_mean(known, is_sum, weigh_by_counted(bool(as_given(batch.arguments)[1])))
    raise no_mean(known, is_sum, same_shape(output, labels, samples))


def is_counted(loss_fn: Callable[..., Any], output: Output, labels: Any, samples: int) -> bool:
    """Whether microbatches add up if labels other than -100 are their weight."""
    if not has_ids(labels):
        return False
    with torch.random.fork_rng(devices=[]):
        found, _ = outcomes(times_counted(loss_fn), output, labels, samples)
    return bool(found) and all(one.apart("sum") <= 1.0 for one in found)


def same_shape(output: Output, labels: Any, samples: int) -> str:
    """What to write where torch makes a matrix of a column and a row."""
    found = [leaf[0] for leaf in output[0] if is_tensor(leaf)]
    wanted = [tuple(t.shape) for t in pytree.tree_leaves(labels) if isinstance(t, torch.Tensor)]
    if len(found) != 1 or len(wanted) != 1 or {len(found[0]), len(wanted[0])} != {1, 2}:
        return ""
    if (samples, 1) not in (found[0], (samples, *wanted[0][1:])):
        return ""
    return (
        f"give output and labels one shape: {[*found[0]]} beside {[samples, *wanted[0][1:]]} "
        "compares each row with each other one; write output.squeeze(1), or labels.squeeze(1). "
        "Otherwise, "
    )


def prepared(
    loss_fn: Callable[..., Any], output: Output, batch: Batch, form: LossForm
) -> tuple[Callable[..., Any], Output, Any]:
    """A loss that may be called freely, of outputs with rows first, and labels that are cut."""
    dims, output = form.dims, with_means(output, form)
    output = rows_first(output, dims)
    own = copy.deepcopy(loss_fn) if isinstance(loss_fn, torch.nn.Module) else loss_fn
    own, labels = with_whole_labels(rows_moved(own, output, dims), batch)
    return own, output, labels


def with_means(output: Output, form: LossForm) -> Output:
    """The same, where means and sums over rows are another number in each half."""
    (leaves, spec), position = output, count()
    kinds = dict.fromkeys(form.means, MeanOfRows) | dict.fromkeys(form.sums, SumOfRows)

    def marked(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        kind = kinds.get(next(position), tuple)
        return kind(leaf) if leaf[1].is_floating_point else leaf

    return [*map(marked, leaves)], spec


def rows_first(output: Output, dims: Sequence[int | None]) -> Output:
    """The same output with rows as the first dimension of each tensor that has them."""
    where, (leaves, spec) = iter(dims or [0] * len(output[0])), output
    return [moved(leaf, next(where)) if is_tensor(leaf) else leaf for leaf in leaves], spec


def moved(leaf: Any, dim: int | None) -> Any:
    """
    >>> moved(((5, 2, 3), torch.float32), 1), is_batched(moved(((2, 3), torch.float32), None), 2)
    (((2, 5, 3), torch.float32), False)
    """
    if isinstance(leaf, Unbatched):
        return leaf
    if dim is None:
        return Unbatched(leaf)
    shape, dtype = leaf
    return (shape[dim], *shape[:dim], *shape[dim + 1 :]) if dim else shape, dtype


def rows_moved(
    loss_fn: Callable[..., Any], output: Output, dims: Sequence[int | None]
) -> Callable[..., Any]:
    """A loss of outputs with rows first: it gets them as the model returns them."""
    if not any(dims):
        return loss_fn
    given = iter(dims)
    where = [next(given) or 0 if is_tensor(leaf) else 0 for leaf in output[0]]

    def loss(made: Any, labels: Any) -> Any:
        leaves, spec = pytree.tree_flatten(made)
        pairs = zip(leaves, where, strict=True)
        back = [leaf.movedim(0, dim) if dim else leaf for leaf, dim in pairs]
        return loss_fn(pytree.tree_unflatten(back, spec), labels)

    return loss


def with_whole_labels(loss_fn: Callable[..., Any], batch: Batch) -> tuple[Callable[..., Any], Any]:
    """A loss of the labels that are cut. It knows those that are the same for all microbatches."""
    labels = batch.arguments[-1]
    leaves, spec = pytree.tree_flatten(labels)
    tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    first = len(batch.tensors) - len(tensors)
    whole = {leaf for k, leaf in enumerate(tensors, first) if k in batch.whole}
    if not whole:
        return loss_fn, labels

    def loss(output: Any, cut: list[Any]) -> Any:
        rest = iter(cut)
        every = [leaf if k in whole else next(rest) for k, leaf in enumerate(leaves)]
        return loss_fn(output, pytree.tree_unflatten(every, spec))

    return loss, [leaf for k, leaf in enumerate(leaves) if k not in whole]


def no_mean(found: Outcome, is_sum: bool, shapes: str = "") -> InputError:
    return InputError.of(
        "loss",
        f"on random outputs it is {found.whole:.4g} for some rows together, and {found.mean:.4g} "
        "in the mean of two halves of them: microbatches would not add up to the whole batch",
        shapes + no_mean_fix(is_sum),
    )


def no_mean_fix(is_sum: bool) -> str:
    """What to write if a loss is no mean over rows."""
    if is_sum:
        return 'it is a sum over rows: give the Trainer reduction="sum"'
    return (
        f"{COMPARED}; if rows have different weights, give the Trainer "
        "loss_weight=lambda *microbatch: the weight of its rows; if some terms are sums over rows "
        "and others are not, divide these sums by the number of rows; if you want the mean of the "
        "microbatches anyway, loss_weight=lambda *microbatch: 1"
    )


def no_sum(whole: float, together: float) -> InputError:
    """A loss that the user calls a sum, and is none: a term counts once for each microbatch."""
    return InputError.of(
        "reduction",
        f'it is "sum", but on random data the loss is {whole:.4g} for some rows together, and '
        f"{together:.4g} in the sum of their parts: what is no sum over rows would count once for "
        "each microbatch",
        "multiply terms that are no sums over rows, such as a regulariser, by the part of the rows "
        "that a microbatch has (`len(labels) / rows of the whole batch`); or divide sums by the "
        'number of rows, and leave out reduction="sum"',
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The loss of some samples, the mean of its halves, the largest of these, and the type."""

    whole: float
    mean: float
    size: float
    dtype: torch.dtype

    def apart(self, kind: Reduction = "mean") -> float:
        """The difference, relative to what rounding explains."""
        limit = ROUNDING[self.dtype] * self.size
        expected = self.mean if kind == "mean" else 2 * self.mean
        return abs(self.whole - expected) / limit if limit else 0.0


def outcomes(
    loss_fn: Callable[..., Any], output: Output, labels: Any, samples: int
) -> tuple[list[Outcome], str]:
    """The outcomes of all trials that can be evaluated; if there are none, why.

    None if the loss is no number that can be compared.
    """
    found, why, seen = list[Outcome](), "", Comparisons()
    for seed, change in draws_of(labels, output):
        failures: list[Exception] = []
        for kind in (torch.float64, torch.float32):  # not all losses compute in float64
            try:
                trial = Trial(output, labels, samples, seed, kind, change, seen)
                with Comparing(seen) if change is Change.NONE else nullcontext():
                    found.append(trial.outcome(loss_fn))
                break
            except NoNumber as error:
                if not change.is_optional:
                    return [], str(error)
            except NotFinite as error:  # in float32, it has fewer digits, and a smaller range
                failures.append(error)
                if change.is_optional:
                    break
            except Exception as error:
                failures.append(error)
        if not change.is_optional:  # of both, that in float64 may be about its type
            why = why or "".join(map(failure, failures[1:]))
    return found, why


def draws_of(labels: Any, output: Output) -> list[tuple[int, Change]]:
    """Seeds, and what becomes of labels."""
    ignored = [(4, Change.IGNORED)] * any(map(has_ids, pytree.tree_leaves(labels)))
    given = [(seed, Change.NONE) for seed in (0, 1)]
    erased = [(seed, Change.ERASED) for seed in (2, NEAR)]
    drawn = [(seed, Change.DRAWN) for seed in (8, 9) if has_integers(output)]
    special = [*drawn, *((7, change) for change in (Change.WEIGHED, *SPECIAL))]
    return [*given, *erased, *ignored, (5, Change.ALIKE), (6, Change.OTHERS), *special]


class NoNumber(Exception):
    """A loss that is another number for the same outputs, or none at all."""


class NotFinite(Exception):
    """A loss that is infinite on some outputs. On others, it may be compared."""


def failure(error: Exception) -> str:
    if isinstance(error, NotFinite):
        return str(error)
    said = filter(None, (type(error).__name__, first_line(error)[:LONGEST]))
    return f"it fails on them with {': '.join(said)}"


def coarsest(output: Output, labels: Any, dtype: torch.dtype) -> torch.dtype:
    """The type that a loss computes in. Coarse outputs or labels may make it coarse inside."""
    types = {leaf[1] for leaf in output[0] if is_tensor(leaf)}
    types |= {t.dtype for t in pytree.tree_leaves(labels) if isinstance(t, torch.Tensor)}
    return next((t for t in (torch.bfloat16, torch.float16) if t in types), dtype)


@dataclass(frozen=True)
class Trial:
    """Random outputs, and labels of the batch, or others that are made from them.

    `poison`: the first number of the first row, in each output that has rows.
    """

    output: Output
    labels: Any
    samples: int
    seed: int
    kind: torch.dtype
    change: Change = Change.NONE
    comparisons: Comparisons = field(default_factory=Comparisons)  # of the trials before
    poison: float | None = None

    def losses(self, loss_fn: Callable[..., Any]) -> list[torch.Tensor]:
        """The loss of two parts together, and of each: two microbatches, or halves of one."""
        (leaves, spec), labels = thinned(self.output, self.labels, self.samples)
        given = [t for t in pytree.tree_leaves(labels) if isinstance(t, torch.Tensor) and t.dim()]
        unit = self.unit(leaves, given[0])
        draw = torch.Generator().manual_seed(self.seed)
        made = [
            like(leaf, self.samples, 2 * unit, draw, given[0].device, self.kind) for leaf in leaves
        ]
        if self.seed == NEAR:
            made = [small(m, leaf, self.samples) for m, leaf in zip(made, leaves, strict=True)]
        if self.change is Change.DRAWN:
            made = [drawn_integers(one, self.seed) for one in made]
        how = unit, self.change, len(given) == 1, self.comparisons
        some = pytree.tree_map_only(torch.Tensor, lambda t: changed(t, *how), labels)
        for one, leaf in zip(made, leaves, strict=True) if self.poison is not None else ():
            if is_batched(leaf, self.samples) and one.is_floating_point():
                one.view(-1)[0] = self.poison

        def loss(part: int, parts: int) -> torch.Tensor:
            outputs = [
                cut(one, leaf, self.samples, part, parts)
                for one, leaf in zip(made, leaves, strict=True)
            ]
            wanted = pytree.tree_map_only(torch.Tensor, lambda t: part_of(t, part, parts), some)
            with torch.no_grad():
                return torch.as_tensor(loss_fn(pytree.tree_unflatten(outputs, spec), wanted))

        with warnings.catch_warnings(), unchecked_distributions():
            warnings.simplefilter("ignore")  # about shapes that only a trial gives
            return [loss(0, 1), loss(0, 2), loss(1, 2)]

    def outcome(self, loss_fn: Callable[..., Any]) -> Outcome:
        """An error if it says nothing."""
        whole, *halves = map(float, losses := self.losses(loss_fn))
        again = float(self.losses(loss_fn)[0])
        if whole != whole:
            raise NoNumber("it is nan on some of them")
        if whole != again:
            raise NoNumber(
                f"it is {whole:.7g} on some, and {again:.7g} on the same ones again: it draws "
                "random numbers, or changes what it keeps from call to call"
            )
        size = max(map(abs, (whole, *halves)))
        if not size < float("inf"):
            parts = " and ".join(f"{one:.4g}" for one in halves)
            raise NotFinite(f"it is {whole:.4g} on some, and {parts} on the halves of these")
        dtype = coarsest(self.output, self.labels, losses[0].dtype)
        return Outcome(whole, sum(halves) / 2, size, dtype)

    def unit(self, leaves: list[Any], first: torch.Tensor) -> int:
        """The samples of each half."""
        fits = most_rows(leaves, self.samples)
        whole = first.shape[0] >= 2 * self.samples
        unit = min(fits, max(self.change.rows, self.samples if whole else self.samples // 2))
        if not unit:
            raise ValueError("too few samples, or too many elements")
        return unit
