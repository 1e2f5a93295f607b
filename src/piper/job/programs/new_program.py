"""Why another program is compiled, and what to do if there are many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    yield f"program {number} (at most {most} are kept): {reason(job, batch, kind, before)}"
    if number == MANY and len({shapes for shapes, *_ in (*before, kind)}) == MANY:
        yield FEWER


def reason(job: Job, batch: Batch, kind: BatchKind, before: Sequence[BatchKind]) -> str:
    shapes, flags, _ = kind
    if shapes not in [one[0] for one in before]:
        return f"new shapes, {new_shapes(job, batch, before[-1])}"
    if flags not in [one[1] for one in before]:
        return "train(), eval() or requires_grad have changed"
    return "what the model keeps in Python has changed"


def new_shapes(job: Job, batch: Batch, last: BatchKind) -> str:
    """Inputs with another shape than last time; or all, if they have other types or others came."""
    names = input_names(job.model, job.loss_fn, batch)
    mine = [list(one.shape) for one in batch.tensors]
    theirs = [list(one[0]) for one in last[0] if isinstance(one, tuple)]
    if len(mine) != len(theirs) or mine == theirs:
        theirs = [[]] * len(mine)
    named = zip(names, mine, theirs, strict=True)
    return ", ".join(f"{name} {shape}" for name, shape, old in named if shape != old)
