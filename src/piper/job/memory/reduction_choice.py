"""When zero=2 and zero=3 reduce gradients, if the strategy does not say.

Once per step sends a gradient once instead of once per microbatch, and keeps whole gradients until
the end of the step. So it is chosen wherever these fit. zero=2 is then the same as zero=1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from piper.directives import Directive, Replicate, Split
from piper.errors import Located
from piper.job.compile.compiler import Compiled
from piper.job.memory.memory_limit import MemoryLimit, fullest

Compile = Callable[[Sequence[Directive]], Compiled]
GIB = 2**30


def reduced_once_if_it_fits(
    program: Sequence[Directive], compile: Compile, limit: MemoryLimit | None
) -> Compiled:
    """The program that reduces once where it has a choice and every device has the memory."""
    if limit is None or not any(map(is_open, program)) or not accumulates(program):
        return compile(program)
    try:
        once = compile([with_choice(one) for one in program])
    except Located:  # if not for this choice, the program as it is says why
        return compile(program)
    return once if fullest(limit.peaks(once))[1] <= limit.usable else compile(program)


def with_choice(one: Directive) -> Directive:
    if isinstance(one, Replicate) and is_open(one):
        return replace(one, zero=1) if one.zero == 2 else replace(one, reduce="once")
    return one


def is_open(one: Directive) -> bool:
    return isinstance(one, Replicate) and one.zero in (2, 3) and one.reduce is None


def accumulates(program: Sequence[Directive]) -> bool:
    """With one microbatch, both choices are the same."""
    return any(isinstance(one, Split) and one.n > 1 for one in program)


def reduction_lines(
    program: Sequence[Directive], made: Compiled, limit: MemoryLimit | None
) -> Iterator[str]:
    """What was chosen, and why."""
    if limit is None or not any(map(is_open, program)) or not accumulates(program):
        return
    levels = sorted({one.zero for one in program if isinstance(one, Replicate) and is_open(one)})
    zero = " and ".join(f"zero={level}" for level in levels)
    reduce = "reduces" if len(levels) == 1 else "reduce"
    peak, there = fullest(limit.peaks(made))[1] / GIB, limit.usable / GIB
    if any(map(is_open, made.program)):
        yield (
            f"{zero} {reduce} the gradients of each microbatch: whole ones would not fit in "
            f"{there:.3g} GiB"
        )
    else:
        yield (
            f"{zero} {reduce} gradients once per step: whole ones fit, with them a device needs "
            f'{peak:.3g} of {there:.3g} GiB (reduce="each" needs less, and sends more)'
        )
