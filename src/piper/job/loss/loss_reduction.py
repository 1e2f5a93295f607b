"""How the losses of microbatches become the loss of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

from piper.capture import Captured
from piper.capture.loss import Count, LossForm, divisor
from piper.errors import InputError
from piper.ir.model import Region
from piper.job.batch.batch import Batch, Sizes
from piper.job.batch.user_weights import WEIGHTS, Weight, weight_of
from piper.job.loss.empty_microbatches import is_known_empty, refuse_empty, refuse_no_divisor
from piper.job.loss.lost_rows import total_of

Reduction = Literal["mean", "sum"]
EVEN = LossForm("mean")
OWN_ROWS = (
    "each microbatch uses its own rows, as in a loop that accumulates gradients, so the loss "
    "differs from that of one batch"
)


@dataclass(frozen=True, slots=True)
class LossReduction:
    """A mean or a sum. `weight` is the user's function for the weight of a microbatch; without it,
    `form` says what the loss divides by."""

    kind: Reduction = "mean"
    weight: Weight | None = None
    form: LossForm = EVEN

    @property
    def count(self) -> Count | None:
        """What the weight of a microbatch is, if all of its loss is divided by the same."""
        return self.form.count if self.kind == "mean" and self.weight is None else None

    def weights(self, batch: Batch, parts: int, sizes: Sizes = ()) -> list[float]:
        """The weight of each microbatch of a batch. `sizes`: their rows, if they differ."""
        if self.weight is None and self.count is None:
            if self.kind == "sum":
                return [1.0] * parts
            if (refused := uncounted(self.form, batch.parts(parts, sizes))) is not None:
                raise refused
            rows = sizes or (1,)
            return [float(rows[k % len(rows)]) for k in range(parts)]
        each = batch.parts(parts, sizes)
        found = [self.weight_of(one) for one in each]
        if self.kind == "mean" and not self.may_be_empty:
            refuse_empty(found, [is_known_empty(self.form, one) for one in each])
        if self.count is not None and self.count.scale is not None:
            refuse_no_divisor([divisor(self.count, one) for one in found])
        self.refuse_different_divisors(found)
        return found

    def refuse_different_divisors(self, totals: Sequence[float]) -> None:
        """Terms that divide by functions of one count: they must be the count itself."""
        if self.count is None or len(self.form.counts) == 1:
            return
        for one, total in product(self.form.counts, totals):
            if (other := divisor(one, total)) != total:
                raise InputError.of(
                    "batch",
                    f"a part of the loss divides by {self.count.what}, of which there are "
                    f"{total:.12g}, and another part by {other:.12g}: no single weight is right",
                    "divide all parts by the same number, such as count.clamp(min=1)",
                )

    def weight_of(self, microbatch: Batch) -> float:
        if self.weight is not None:
            return weight_of(self.weight, microbatch)
        assert self.count is not None
        return total_of(self.form.of(microbatch.rows).counts[0], microbatch)

    def example(self, microbatches: Sequence[Batch]) -> Batch:
        """The first in which something counts, of those that have the size of the first."""
        first = microbatches[0]
        if self.count is None:
            return first
        alike = (one for one in microbatches if one.rows == first.rows)
        return next((one for one in alike if self.weight_of(one) > 0), first)

    @property
    def may_be_empty(self) -> bool:
        """Whether a microbatch in which nothing counts has no gradient, rather than NaN."""
        counts = self.form.counts
        if self.count is not None and len(counts) > 1:
            return False  # a divisor of at least 1 may have a numerator, and the others have none
        alone = self.form.kind == "mean" and not self.form.even and bool(counts)
        return alone and all(one.empty or one.scale is not None for one in counts)

    def shares(self, own: Sequence[float], everyone: float) -> tuple[float, ...]:
        """The factor of each microbatch in the loss. `everyone` is the weight of all replicas.

        >>> LossReduction("mean").shares([1.0, 3.0], 8.0), LossReduction("sum").shares([1.0], 8.0)
        ((0.125, 0.375), (1.0,))
        """
        whole = self.whole(everyone)
        return tuple(factor / whole for factor in self.factors(own))

    def factors(self, own: Sequence[float]) -> list[float]:
        """The factor of each microbatch, before the sum is divided by `whole`."""
        if self.kind == "sum":
            return [1.0] * len(own)
        return [weight if self.count is None else divisor(self.count, weight) for weight in own]

    def whole(self, everyone: float) -> float:
        """What the sum of all microbatches is divided by, given the weight of all replicas."""
        if self.kind == "sum":
            return everyone if self.weight is not None else 1.0
        self.refuse_different_divisors([everyone])
        return everyone if self.count is None else divisor(self.count, everyone)

    @property
    def is_guessed(self) -> bool:
        """Whether it is taken for a mean or a sum without a proof."""
        unknown = self.form.kind is None and not self.form.numbered
        return unknown and self.weight is None

    @property
    def is_plain_mean(self) -> bool:
        """Whether rows have the same weight."""
        return self.kind == "mean" and self.weight is None and self.count is None

    def lines(self) -> Iterator[str]:
        """What microbatches weigh, in words."""
        if self.weight is None and self.count is not None:
            yield (
                f"the loss is a mean over {self.count.what}: a microbatch counts by how many of "
                f"them it has{self.count.weighed}"
            )
        elif self.weight is None and self.form.kind == "sum":
            yield "the loss is a sum over rows: the losses of microbatches are added up"

    def warnings(self, microbatches: Sequence[Batch]) -> Iterator[str]:
        """A weight that the user gives may differ from what the loss itself divides by.

        A batch whose microbatches have none is an error of its step: of an example, it is not yet.
        """
        if self.is_plain_mean and (refused := uncounted(self.form, microbatches)) is not None:
            problem = refused.problems[0]
            yield f"a step on a batch like this one is an error: {problem.what}; {problem.fix}"
        counts = self.form.counts if self.kind == self.form.kind == "mean" else ()
        if self.weight is None or len(counts) != 1 or self.form.even:
            return
        given = [self.weight_of(one) for one in microbatches]
        right = [total_of(self.form.of(one.rows).counts[0], one) for one in microbatches]
        if len(set(given)) > 1 and any(
            abs(a * sum(right) - b * sum(given)) > 1e-6 * sum(given) * sum(right)
            for a, b in zip(given, right, strict=True)
        ):
            yield (
                f"loss_weight says {given}, but the loss is a mean over {counts[0].what}, of "
                f"which microbatches have {right}: leave out loss_weight, and Piper uses these"
            )


COMPARED = (
    "use one microbatch and one replica where rows are compared with each other, for the loss of "
    "the whole batch"
)


def reduction_of(
    said: Reduction | None, own_loss: bool, weight: Weight | None, parts: int, form: LossForm
) -> LossReduction:
    """What the user says, or else what is proved of the loss.

    A loss function without a proof is tested (mean_loss_check.py). A model's own loss cannot be.
    """
    if weight is not None or parts == 1:
        return LossReduction(said or "mean", weight, form if parts > 1 else EVEN)
    if said is not None and form.kind is not None and said != form.kind:
        raise InputError.of(
            "reduction",
            f"it is {said!r}, but the loss is a {form.kind} over the rows of its batch",
            f'leave it out, or write reduction="{form.kind}"; to weigh microbatches in another '
            f"way, give {WEIGHTS}",
        )
    if said != "sum" and form.kind is None and form.growing:
        raise growing_output(form.growing)
    if said is None and form.kind is None and form.threshold:
        raise by_count(form.threshold)
    if said is None and form.kind is None and form.decides:
        raise bent(form.decides)
    if said is None and form.numbered:
        raise numbered_output()
    if said is None and form.kind is None and own_loss:
        raise InputError.of(
            "reduction",
            f"the model computes its own loss, for each of {parts} parts of a batch (microbatches "
            "of all replicas), and Piper cannot see how it reduces over rows. A loss that compares "
            "rows with each other (contrastive), the balancing loss of a mixture "
            "(output_router_logits=True), or a mean over a mask that the model draws is no mean of "
            "the losses of its parts",
            f'{COMPARED}. If the mean of the parts is what you want, give reduction="mean" to the '
            f'Trainer or from_pretrained; "sum" if they add up; or {WEIGHTS}. A mask can be given '
            "with the batch",
        )
    return LossReduction(said or form.kind or "mean", None, form)


def bent(where: str) -> InputError:
    """A decision by what all rows give, which each microbatch would make for itself."""
    return InputError.of(
        "loss",
        f"it is no mean or sum over rows: what it computes from all of them at {where} is "
        "compared, cut off or replaced, or divides. For most data this makes no difference, but "
        "if a row is not finite, or the loss is large, each microbatch decides for itself",
        "do it with the loss of each row, and take the mean of these at the end: "
        "`torch.nan_to_num(losses).mean()`; the Trainer's on_nan= leaves out steps that are not "
        "finite; if you want the mean of the microbatches anyway, give the Trainer "
        "loss_weight=lambda *microbatch: 1",
    )


def by_count(where: str) -> InputError:
    """A decision by how many rows count."""
    return InputError.of(
        "loss",
        f"it is no mean or sum over rows: it depends at {where} on how many rows of the batch "
        "count, or whether any does, and each microbatch would count its own",
        "for a mean that is 0 if none counts, divide by at least 1: "
        "`(losses * mask).sum() / mask.sum().clamp(min=1)`; for other thresholds, use one "
        "microbatch and one replica; if you want the mean of the microbatches, give the Trainer "
        "loss_weight=lambda *microbatch: 1",
    )


def growing_output(where: str) -> InputError:
    return InputError.of(
        "loss",
        f"the model returns a sum or a norm over the rows of its batch ({where}), and the loss is "
        "no sum over rows: the mean of its microbatches differs from the whole batch",
        "return a mean over rows instead, such as `aux / x.shape[0]`, or one value for each row "
        "and reduce them in the loss; if you want the mean of the microbatches anyway, give the "
        "Trainer loss_weight=lambda *microbatch: 1",
    )


def numbered_output() -> InputError:
    return InputError.of(
        "loss",
        "the model returns a Python number that follows the number of rows of its batch, such as "
        "len(x), so Piper cannot see how the loss reduces over rows",
        "return tensors only, and count in the loss: `len(labels)`, `labels.numel()`; or give the "
        'Trainer reduction="mean" if the loss of a batch is the mean of those of its parts',
    )


def accumulation_lines(captured: Captured, microbatches: int, replicas: int) -> Iterator[str]:
    """A warning if several parts of a batch are not the whole batch, as the graphs show.

    Replicas have buffers of their own: those that a replica updates, it updates for its parts only.
    """
    if microbatches * replicas > 1:
        yield from [own_rows(captured.meeting)] if captured.meeting else []
        yield from [unclear_draw(captured.unclear_draw)] if captured.unclear_draw else []
        yield from update_lines(captured.model.regions, microbatches) if microbatches > 1 else ()


def own_rows(where: str) -> str:
    """Rows meet here, as a graph or a trial on numbers shows."""
    at = f" at {where}" if where else ""
    return (
        f"rows of the batch meet{at}, or the model computes with their number (x.shape[0]): "
        f"{OWN_ROWS}; use one microbatch and one replica to make them equal"
    )


def unclear_draw(where: str) -> str:
    return (
        f"Piper cannot see which random numbers of {where} belong to which rows of the batch: they "
        "differ with the number of microbatches and replicas; draw them with a size that has "
        "x.shape[0] as one dimension, and choose or reorder them after that"
    )


def update_lines(regions: Iterable[Region], parts: int) -> Iterator[str]:
    """A warning for buffers that microbatches compute with and update, one after the other."""
    names = dict.fromkeys(name for one in regions if one.stateful for name in one.reads_state)
    if names:
        it = "it" if len(names) == 1 else "them"
        yield (
            f"the model computes with {', '.join(names)} and updates {it} in its forward: each of "
            f"{parts} microbatches updates {it}, as in a loop that accumulates gradients, so the "
            "loss differs from that of one batch; use one microbatch to make them equal"
        )


def unknown_lines(unknown: Sequence[str]) -> Iterator[str]:
    """A warning for numbers that count as means over rows, if nothing shows that they are."""
    if unknown:
        where = ", ".join(filter(None, unknown))
        yield (
            f"the model returns a number without rows{f' ({where})' if where else ''}: Piper takes "
            "it for a mean over the rows of its microbatch, which its graph does not show; each "
            "microbatch uses its own rows, as in a loop that accumulates gradients; return one "
            "value for each row if it is no mean"
        )


def reduction_of_batches(
    said: Reduction | None, weight: Weight | None, form: LossForm, parts: int
) -> LossReduction:
    """How the losses of batches that are evaluated one by one become one.

    `parts`: of a batch in training. Where it is whole, its loss may be any, and so it may be here.
    """
    is_any = parts == 1 and form.kind == "mean" and form.count is None
    known = form if form.kind is not None and not is_any else EVEN
    return LossReduction(said or form.kind or "mean", weight, known)


def refuse_wrong_reduction(said: str | None) -> None:
    if said not in (None, "mean", "sum"):
        raise InputError.of("reduction", f"{said!r} is not a reduction", 'write "mean" or "sum"')


def uncounted(form: LossForm, microbatches: Sequence[Batch]) -> InputError | None:
    """Terms with different divisors have one weight only if everything counts in all of them."""
    if form.obscure:
        return InputError.of(
            "loss",
            "cross_entropy has class weights, or its labels are computed, so microbatches "
            "may have different weights",
            "give the Trainer loss_weight=lambda *microbatch: the weight of its labels, "
            "or 1 if all have the same weight",
        )
    for part, one in enumerate(microbatches if form.counts else ()):
        for count in form.of(one.rows).counts:
            found, full = total_of(count, one), count.full
            if count.scale is not None or not is_full(found, count, one, form):
                of = f" of {full}" if full is not None else ""
                return InputError.of(
                    "batch",
                    f"a part of the loss is a mean over {count.what}, another part is not: in "
                    f"microbatch {part} there are {found:g}{of}, so no single weight is right",
                    "make both means over rows: with w = mask * mask.numel() / mask.sum() in your "
                    "batches, for the mask of all replicas together, (losses * w).mean() is the "
                    "mean of the losses in the mask; use one microbatch and one replica; or give "
                    "the Trainer loss_weight=lambda *microbatch: the weight that you want",
                )
    return None


def is_full(found: float, count: Count, one: Batch, form: LossForm) -> bool:
    """Whether everything counts in a microbatch, but for what the model itself leaves out, such as
    the label after the last token: for batches of this shape, that is the same in all of them."""
    if found == count.full:
        return True
    most = total_of(count, one.map(torch.ones_like)) if found and not form.others else 0
    return bool(found) and found == most


def refuse_weightless(everyone: float) -> None:
    if everyone <= 0:
        raise InputError.of(
            "batch",
            "all microbatches of all replicas have weight 0: no label counts, or loss_weight is 0",
            "leave such a batch out",
        )


def alike(form: LossForm) -> LossForm:
    """The same: losses of microbatches of all sizes must reduce over rows in the same way."""
    for rows, other in form.others:
        if other.shape != form.shape:
            raise InputError.of(
                "batch",
                f"the loss of a microbatch of {rows} rows reduces over them in another way than "
                "that of the first microbatch",
                "use a batch that the number of microbatches divides",
            )
    return form
