"""The programs of one step: one for all replicas, or one for each length of their batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

from piper.capture.trace.arguments.layouts import refuse_asked
from piper.errors import InputError
from piper.ir.placement.replicas import Replicas
from piper.job.batch.batch import Batch
from piper.job.batch.shaped_batches import in_shapes
from piper.job.job import BatchKind, Job
from piper.job.loss.loss_reduction import LossReduction, reduction_of_batches
from piper.job.processes import consistency
from piper.job.processes.consistency import SAME_SHAPES, Agreed
from piper.job.processes.different_lengths import BatchForm, Lengths
from piper.job.programs.forward_programs import ForwardPrograms
from piper.job.programs.programs import Programs
from piper.plan.instructions import Gather, Plan, Reduce, Total
from piper.runtime.processes.gathering import everyone

LOG = logging.getLogger("piper")


def agreed_step(
    job: Job, batch: Batch, kind: BatchKind, feed: int, mine: Agreed, known: bool,
    lengths: bool = True,
) -> Agreed:  # fmt: skip
    """What all processes know before a step. With `lengths`, those of replicas may differ."""
    data, (shapes, flags, _) = consistency.compared(batch.tensors, known), kind
    form = BatchForm(feed, shapes, flags, batch.rows or 1, batch.tokens)
    may_differ = form if lengths and not job.rows.unequal else None
    given = (shapes, flags), data, feed, job.replicas, mine, may_differ
    found = consistency.agree_on_step(*given)
    if found.twins and not known:
        LOG.warning(
            "replicas %d and %d were given the same batch, so they train on its rows twice: load "
            "the data by trainer.replica of trainer.replicas", *found.twins,
        )  # fmt: skip
    return found


def prepared(
    programs: Programs, batch: Batch, feed: int, kind: BatchKind, lengths: Lengths | None,
    steps: int,
) -> bool:  # fmt: skip
    """Compile what a step needs. Returns whether anything was new.

    All processes compile and use the same programs in the same order, also those of replicas with
    other lengths: so they also forget the same.
    """
    kinds = kinds_of(kind, lengths)
    refuse_many(len(kinds), programs.job.options.max_programs)
    new = not all(map(programs.has, kinds))
    rows = programs.job.rows

    def plans() -> list[Plan]:
        for one in kinds:
            known = one == kind or programs.has(one)
            given = batch if known else in_shapes(batch, one[0], "cpu")
            programs.get(rows.as_first(given, feed) if new else given, one, steps)
        return [programs.assigned[one].plan for one in kinds]

    made = plans()
    refuse_asked(batch.tensors, programs.assigned[kind].common.asked)
    programs.job.python_state.refuse_attributes(batch.tensors)
    if not new:
        programs.check.step(programs.job, kind)
    if len(kinds) > 1:
        refuse_unknown_weights([programs.reduction(one) for one in kinds])
        if not have_same_messages(made, programs, ("step", *kinds)):
            new = True
            refuse_other_messages(plans, programs, ("step", *kinds))
    return new


def evaluation_prepared(forwards: ForwardPrograms, batch: Batch, lengths: Lengths | None) -> bool:
    """The same for programs that only compute the loss."""
    kinds = kinds_of(forwards.kind(batch), lengths)
    refuse_many(len(kinds), forwards.job.options.max_programs)
    batches = [in_shapes(batch, one[0], "cpu") for one in kinds] if lengths else [batch]
    new = not all(forwards.has(one, "loss") for one in batches)

    def plans() -> list[Plan]:
        return [forwards.get(one, "loss")[0].plan for one in batches]

    made = plans()
    if len(kinds) > 1:
        refuse_unknown_weights([evaluated_reduction(forwards, one) for one in kinds])
        if not have_same_messages(made, forwards.programs, ("evaluate", *kinds)):
            new = True
            refuse_other_messages(plans, forwards.programs, ("evaluate", *kinds))
    return new


def evaluated_reduction(forwards: ForwardPrograms, kind: BatchKind) -> LossReduction:
    options, parts = forwards.job.options, forwards.job.all_microbatches
    given = options.reduction, options.loss_weight, forwards.forms[kind]
    return reduction_of_batches(*given, parts)


def kinds_of(kind: BatchKind, lengths: Lengths | None) -> list[BatchKind]:
    """That of a batch, or those of the batches of all replicas: the same in all processes."""
    shapes = [kind[0]] if lengths is None else list(dict.fromkeys(lengths.shapes))
    return [(each, *kind[1:]) for each in shapes]


def refuse_lengths(call: str, lengths: Lengths | None) -> None:
    if lengths is not None:
        what = f"{call} measures one program, and replicas have batches of different lengths"
        raise InputError.of("batch", what, SAME_SHAPES)


def refuse_many(kinds: int, most: int) -> None:
    if kinds > most:
        what = f"replicas have batches of {kinds} shapes in one step, and max_programs={most}"
        raise InputError.of("batch", what, f"give the Trainer max_programs={kinds} or more")


def refuse_unknown_weights(reductions: Sequence[LossReduction]) -> None:
    """A mean over rows does not say what longer rows weigh."""
    divisors = {(one.kind, one.count and (one.count.what, one.count.scale)) for one in reductions}
    multiples = any(len({count.factor for count in one.form.counts}) > 1 for one in reductions)
    if len(divisors) > 1 or multiples or reductions[0].is_plain_mean:
        what = "the batches of replicas have different lengths, and Piper does not see what the "
        what += "loss divides by, so it does not know what each of them weighs"
        fix = "give the Trainer loss_weight=lambda *microbatch: its weight, such as the number of "
        raise InputError.of("batch", what, f"{fix}its labels that count; or {SAME_SHAPES}")


def refuse_other_messages(
    plans: Callable[[], list[Plan]], programs: Programs, key: Hashable
) -> None:
    """Plans that differ: where memory is free depends on lengths, and so do zero=3's gathers.

    These can be fixed. Other messages cannot.
    """
    if not programs.fix_gathers() or not have_same_messages(plans(), programs, key):
        what = "the batches of replicas have different lengths, and under this strategy (stages, "
        what += "divided weights, shared experts) messages or their order depend on lengths"
        raise InputError.of("batch", what, SAME_SHAPES)


def have_same_messages(plans: Sequence[Plan], programs: Programs, key: Hashable) -> bool:
    """Replicas run different programs: what they send each other must be the same in all."""
    if key in programs.alike:
        return True
    outlines = [outline(one, programs.job.feeds) for one in plans]
    fits = outlines[0] is not None and all(one == outlines[0] for one in outlines)
    if not all(everyone(fits, "the comparison of programs")):
        return False
    programs.alike.add(key)
    return True


def outline(plan: Plan, feeds: Replicas) -> list[object] | None:
    """The messages of a device, which all programs of a step must have in the same order.

    Then none waits forever: everyone gets to the first, so it arrives; then to the second. None:
    replicas cannot run different programs. Devices of one replica that send each other something
    (stages, divided weights) do so in an order that depends on lengths. Replicas must send each
    other only gradients, parameters and totals.
    """
    found = list[object]()
    for one in plan.instructions:
        meets = one.communicator(plan.device)
        if meets is None:
            continue
        inside = len({feeds.feed(each) for each in meets.members}) == 1
        if inside or not isinstance(one, Gather | Reduce | Total):
            return None
        found.append((type(one).__name__, meets, getattr(one, "messages", ())))
    return found
