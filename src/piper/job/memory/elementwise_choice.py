"""Results of elementwise operators that would wait for a backward are recomputed where many wait.

A pipeline keeps activations of several microbatches at once, and experts get more rows than their
share. Who asks for zero=2 or 3 is short of memory, and pays for it with messages. There, what one
elementwise operator or norm computes from something that is kept anyway, such as the product in a
SwiGLU, is not kept, unless its backward follows at once. The backward repeats these operators, with
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from piper.directives import Directive, Remat, Replicate, Shard
from piper.directives.remat import policies_of
from piper.ir.model import Model, Region
from piper.ir.remat_policy import COSTLY, RematPolicy
from piper.job.compile.compiler import Compiled
from piper.job.memory.memory_limit import MemoryLimit
from piper.job.memory.remat_choice import exactly, passes
from piper.job.memory.zero_choice import accumulates, choice_lines, is_pipeline
from piper.names import BW, F, RegionId
from piper.plan.analyse.memory import peak
from piper.plan.instructions import Plan
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
    return (many or is_short(program)) and not any(isinstance(one, Remat) for one in program)


def is_short(program: Program) -> bool:
    return any(isinstance(one, Replicate) and one.zero >= 2 for one in program)


def without_elementwise(program: Program, kept: Compiled, compile: Compile) -> Compiled:
    """The same without such results, if the fullest device then holds less.

    `program` is as the user wrote it: in `kept`, zero=2 may be zero=1.
    """
    chosen = list(directives(kept)) if may_choose(program) else []
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
    """Regions that wait, and for which it frees enough."""
    held = {region for plan in kept.plans for region in waiting(plan)}
    for region in kept.dag.model.regions:
        found = region.recomputed.get(POLICY)
        enough = found and found.recomputes and found.recomputes.frees >= LEAST
        if region.id in held and enough:
            yield region


def waiting(plan: Plan) -> Iterator[RegionId]:
    """Regions whose activations a device keeps while other backwards run."""
    backwards, before = 0, dict[RegionId, int]()
    for region, phase in passes(plan):
        if phase is F:
            before[region] = backwards
            continue
        if phase is not BW and backwards > before[region]:
            yield region
        backwards += 1


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
            f"{names_text([one.id for one in found])} recompute results of elementwise operators "
            f"and norms: {freed_text(freed)} per microbatch "
            "(Remat(where(), keep=1.0) keeps everything)"
        )
