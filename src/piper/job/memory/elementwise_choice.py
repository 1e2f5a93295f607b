"""Results of elementwise operators that would wait for a backward are recomputed where many wait.

A pipeline keeps activations of several microbatches at once, and experts get more rows than their
share. There, what one elementwise operator computes from something that is kept anyway, such as the
product in a SwiGLU, is not kept. The backward repeats these operators, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from piper.directives import Directive, Remat, Shard
from piper.directives.remat import policies_of
from piper.ir.model import Model, Region
from piper.ir.remat_policy import COSTLY, RematPolicy
from piper.job.compile.compiler import Compiled
from piper.job.memory.memory_limit import MemoryLimit
from piper.job.memory.remat_choice import exactly, most_alive
from piper.job.memory.zero_choice import accumulates, choice_lines, is_pipeline
from piper.plan.analyse.memory import peak
from piper.view.reports.recomputation import freed_text, names_text

Program = Sequence[Directive]
Compile = Callable[[Program], Compiled]
POLICY: RematPolicy = (COSTLY,)
LEAST = 2**20  # bytes of a region and a microbatch: for less, it is not worth the operators


def policies(program: Program, model: Model) -> tuple[RematPolicy, ...]:
    """How regions may be recomputed: as a strategy asks, or as it is chosen here.

    Capture makes graphs for each, so not for a model whose activations are all small.
    """
    large = any(sum(spec.nbytes for spec in one.saved) > LEAST for one in model.regions)
    return policies_of(program) or ((POLICY,) if large and may_choose(program) else ())


def may_choose(program: Program) -> bool:
    """Whether it holds much, and does not say itself what is recomputed."""
    experts = any(isinstance(one, Shard) and one.what == "experts" for one in program)
    many = experts or (is_pipeline(program) and accumulates(program))
    return many and not any(isinstance(one, Remat) for one in program)


def without_elementwise(kept: Compiled, compile: Compile) -> Compiled:
    """The same without such results, if the fullest device then holds less."""
    chosen = list(directives(kept)) if may_choose(kept.program) else []
    if not chosen:
        return kept
    made = compile([*kept.program, *chosen])
    return made if most_held(made) < most_held(kept) else kept


def directives(kept: Compiled) -> Iterator[Remat]:
    """One for all regions with the same tags."""
    tags = dict.fromkeys(region.tags for region in worth_it(kept))
    names = dict.fromkeys(name for one in kept.dag.model.regions for name, _ in one.tags)
    yield from (Remat(exactly(one, names), POLICY) for one in tags)


def worth_it(kept: Compiled) -> Iterator[Region]:
    alive = [most_alive(plan) for plan in kept.plans]
    for region in kept.dag.model.regions:
        found = region.recomputed.get(POLICY)
        many = region.id in kept.dag.shardings or any(one[region.id] > 1 for one in alive)
        if many and found and found.recomputes and found.recomputes.frees >= LEAST:
            yield region


def most_held(made: Compiled) -> int:
    """Bytes on the fullest device, without the optimizer's state, which does not change."""
    return max(peak(made.dag, plan, optimizer=0.0).total for plan in made.plans)


def chosen_lines(program: Program, made: Compiled, limit: MemoryLimit | None) -> Iterator[str]:
    """What was chosen by memory, and how to choose otherwise."""
    yield from choice_lines(program, made, limit)
    found = [one for one in made.dag.model.regions if one.recomputes]
    if found and may_choose(program):
        freed = sum(one.recomputes.frees for one in found if one.recomputes)
        yield (
            f"{names_text([one.id for one in found])} recompute results of elementwise operators: "
            f"{freed_text(freed)} per microbatch (Remat(where(), keep=1.0) keeps everything)"
        )
