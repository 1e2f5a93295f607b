"""What zero=2 and zero=3 leave to the memory of a device: when to reduce, and what to hold.

Reducing once per step sends a gradient once instead of once per microbatch, and keeps whole
gradients until the end of the step. Holding what was gathered sends parameters once instead of
before each use. So both are chosen wherever they fit. zero=2 is then the same as zero=1.

Without a pipeline, only as much is held as does not raise the peak (passes/gathers.py). Pipelines
run more microbatches through fewer layers, which they would gather again and again: they hold all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from piper.directives import Directive, Place, Replicate, Split
from piper.errors import Located
from piper.job.compile.compiler import Compiled
from piper.job.memory.memory_limit import MemoryLimit, fullest
from piper.view.reports.footprint import size_text

Program = Sequence[Directive]
Compile = Callable[[Program], Compiled]
GIB = 2**30
HOLDING = (
    "holds gathered parameters as long as that does not raise the peak "
    "(more gather_buffers hold more, and send less)"
)
CHOICES = ((True, True), (False, True), (True, False))  # reduce once, hold; fewest bytes sent first


def fewest_messages_that_fit(
    program: Program, compile: Compile, limit: MemoryLimit | None, regions: int
) -> Compiled:
    """The program that sends least, of those for which every device has the memory.

    If none fits in what the user gave, it is the one that needs least: the error shows its figure.
    """
    tried: list[Compiled] = []
    for choice in choices(program, regions) if limit is not None else ():
        try:
            made = compile(choice)
        except Located:  # if not for this choice, the program as it is says why
            continue
        if limit is not None and fullest(limit.peaks(made))[1] <= limit.usable:
            return made
        tried.append(made)
    tried.append(compile(program))
    if limit is None or not limit.is_given:
        return tried[-1]
    return min(reversed(tried), key=lambda one: fullest(limit.peaks(one))[1])


def choices(program: Program, regions: int) -> Iterator[Program]:
    """Other programs than this one, with what it leaves open."""
    found: list[Program] = [program]
    for once, hold in CHOICES:
        way = once and accumulates(program), regions if hold and is_pipeline(program) else None
        choice = [with_choice(one, *way) for one in program]
        if choice not in found:
            found.append(choice)
            yield choice


def with_choice(one: Directive, once: bool, buffers: int | None) -> Directive:
    if isinstance(one, Replicate) and once and reduces_freely(one):
        one = replace(one, zero=1) if one.zero == 2 else replace(one, reduce="once")
    if isinstance(one, Replicate) and buffers and holds_freely(one):
        one = replace(one, gather_buffers=buffers)
    return one


def reduces_freely(one: Directive) -> bool:
    return isinstance(one, Replicate) and one.zero in (2, 3) and one.reduce is None


def holds_freely(one: Directive) -> bool:
    return isinstance(one, Replicate) and one.zero == 3 and one.gather_buffers is None


def choice_lines(program: Program, made: Compiled, limit: MemoryLimit | None) -> Iterator[str]:
    """What was chosen, and why."""
    if limit is None:
        return
    there = size_text(limit.usable)
    needs = f"a device then needs {size_text(fullest(limit.peaks(made))[1])} of {there}"
    if accumulates(program) and any(map(reduces_freely, program)):
        each = any(map(reduces_freely, made.program))
        yield f"{reducing(program)} {reduction_text(each, needs, there)}"
    if any(map(holds_freely, program)) and not is_pipeline(program):
        yield f"zero=3 {HOLDING}"
    elif any(map(holds_freely, program)):
        yield f"zero=3 gathers {gather_text(any(map(holds_freely, made.program)), needs, there)}"


def is_pipeline(program: Program) -> bool:
    return len({one.devices for one in program if isinstance(one, Place)}) > 1


def accumulates(program: Program) -> bool:
    """With one microbatch, both ways to reduce are the same."""
    return any(isinstance(one, Split) and one.n > 1 for one in program)


def reducing(program: Program) -> str:
    free = [one for one in program if isinstance(one, Replicate) and reduces_freely(one)]
    levels = [f"zero={level}" for level in sorted({one.zero for one in free})]
    return f"{levels[0]} reduces" if len(levels) == 1 else f"{' and '.join(levels)} reduce"


def reduction_text(each: bool, needs: str, there: str) -> str:
    if each:
        return f"the gradients of each microbatch: whole ones would not fit in {there}"
    less = '(reduce="each" needs less, and sends more)'
    return f"gradients once per step, since whole ones fit: {needs} {less}"


def gather_text(each: bool, needs: str, there: str) -> str:
    if each:
        return f"parameters before each use: whole ones would not fit in {there}"
    less = "(gather_buffers=2 needs less, and sends more)"
    return f"parameters once per step, since whole ones fit: {needs} {less}"
