"""Why another program is compiled, and what to do if there are many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.capture.trace.arguments.inputs import name_of
from piper.job.batch.batch import Batch
from piper.job.batch.input_names import input_names
from piper.job.job import BatchKind, Job

MANY = 5  # programs, from which on other lengths are probably still to come
FEWER = (
    "each new shape is compiled: pad rows to a few lengths, such as with pad_to_multiple_of=64 in "
    "the collator, and there are fewer"
)


def new_program_lines(
    job: Job, batch: Batch, kind: BatchKind, before: Sequence[BatchKind]
) -> Iterator[str]:
    """What is new since the last program. Nothing for the first: it is no surprise."""
    if not before:
        return
    number, most = len(before) + 1, job.options.max_programs
    yield f"compiling program {number} (limit {most}) {reason(job, batch, kind, before)}"
    if number == MANY and len({shapes for shapes, *_ in (*before, kind)}) == MANY:
        yield FEWER


def reason(job: Job, batch: Batch, kind: BatchKind, before: Sequence[BatchKind]) -> str:
    shapes, flags, _ = kind
    if shapes not in [one[0] for one in before]:
        return new_inputs(job, batch, before)
    if flags not in [one[1] for one in before]:
        return "because train(), eval() or requires_grad have changed"
    return "because what the model keeps in Python has changed"


def new_inputs(job: Job, batch: Batch, before: Sequence[BatchKind]) -> str:
    """Inputs with another shape than last time, or of another type than ever; or all of them."""
    names = input_names(job.model, job.loss_fn, batch)
    mine = [(tuple(one.shape), one.dtype) for one in batch.tensors]
    known = [[one for one in shapes if isinstance(one, tuple)] for shapes, *_ in before]
    alike = [one for one in known if [row[0] for row in one] == [row[0] for row in mine]]
    theirs = (alike or known)[-1]
    if len(mine) != len(theirs) or mine == theirs:
        theirs = [((), None)] * len(mine)
    named = list(zip(names, mine, theirs, strict=True))
    shapes = [f"{name} {list(new[0])}" for name, new, old in named if new[0] != old[0]]
    if shapes:
        return f"for a new batch shape: {', '.join(shapes)}"
    types = [f"{name} in {name_of(new[1])}" for name, new, old in named if new[1] != old[1]]
    return f"for a new batch type: {', '.join(types)}"
