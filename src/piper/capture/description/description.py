"""Names and numbers of regions, and their description for the rest of Piper."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from piper.capture.description.buckets import Part
from piper.capture.description.region_graphs import Lowered
from piper.capture.description.state_reads import read_buffers
from piper.capture.fx_nodes import is_symbolic, number_dtype, value
from piper.capture.graphs.phases import Layout
from piper.capture.marks.annotate import Mark, Path
from piper.capture.trace.arguments.inputs import name_of, spec_of
from piper.ir.model import Moments, Region
from piper.ir.values import TensorSpec
from piper.names import Phase, RegionId, ValueId

Tags = tuple[tuple[str, int], ...]


def number_tags(paths: Sequence[Path]) -> list[Tags]:
    """Number the regions of a name in program order. Explicit numbers stay."""
    taken = {(mark.name, mark.index) for path in paths for mark in path if mark.index is not None}
    numbers: dict[tuple, int] = {}
    free: dict[str, int] = {}

    def number(mark: Mark) -> int:
        if mark.index is not None:
            return mark.index
        if mark.identity not in numbers:
            index = free.get(mark.name, 0)
            while (mark.name, index) in taken:
                index += 1
            free[mark.name] = index + 1
            numbers[mark.identity] = index
        return numbers[mark.identity]

    return [tuple((mark.name, number(mark)) for mark in path) for path in paths]


def region_ids(tags: Sequence[Tags]) -> tuple[list[RegionId], list[int]]:
    """PP0, PP1.EP3; the second run of the same tags is PP0#1. With these, which run each is.

    >>> region_ids([(("PP", 0),), (("PP", 1),), (("PP", 0),)])
    (['PP0', 'PP1', 'PP0#1'], [0, 0, 1])
    """
    seen: Counter[str] = Counter()
    ids, runs = [], []
    for tag in tags:
        name = ".".join(f"{key}{index}" for key, index in tag)
        name = name or ("all" if len(tags) == 1 else "rest")
        runs.append(seen[name])
        ids.append(RegionId(f"{name}#{runs[-1]}" if runs[-1] else name))
        seen[name] += 1
    return ids, runs


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run of each phase takes."""

    flops: dict[Phase, float]
    workspace: dict[Phase, int]  # bytes that it allocates while it runs
    traffic: dict[Phase, float]  # bytes that operators without arithmetic read and write
    operators: dict[Phase, int]
    fused: dict[Phase, tuple[float, int]]  # traffic and operators, if a compiler fuses them
    fused_workspace: dict[Phase, int]
    expert_workspace: dict[Phase, Moments]  # empty if it is no region of experts
    fused_expert_workspace: dict[Phase, Moments]


def describe(
    lowered: Lowered,
    id: RegionId,
    tags: Tags,
    run: int,
    code: str,
    values: Mapping[fx.Node, ValueId],
    part: Part,
    cost: Cost,
) -> Region:
    chunk, cut = lowered.chunk, lowered.cut
    buckets, layout = part
    weights = len(chunk.weights)
    gradients = lowered.joint.gradients[weights:]
    tangents = [i for i, given in enumerate(lowered.given) if given]
    return Region(
        id=id,
        tags=tags,
        run=run,
        code=code,
        source=chunk.source,
        inputs=tuple(values[node] for node in chunk.inputs),
        outputs=tuple(values[node] for node in chunk.outputs),
        buckets=buckets,
        input_grads=tuple(i for i, gradient in enumerate(gradients) if gradient is not None),
        output_grads=tuple(tangents),
        backward_inputs=_inputs(cut.backward_arguments, weights),
        backward_buckets=_buckets(cut.backward_arguments, layout),
        saved=_specs(cut.saved),
        weight_inputs=_inputs(cut.weight_arguments, weights),
        weight_output_grads=tuple(tangents[i] for i in cut.weight_tangents),
        weight_buckets=_buckets(cut.weight_arguments, layout),
        carry=_specs(cut.carry),
        stateful=bool(chunk.updates),
        reads_state=(read := read_buffers(lowered)),
        varying_state=tuple(name for name in read if name not in chunk.steady),
        has_backward=bool(tangents),
        flops=cost.flops,
        workspace=cost.workspace,
        traffic=cost.traffic,
        operators=cost.operators,
        axes=chunk.piece.axes if chunk.piece else (),
        fused=cost.fused,
        fused_workspace=cost.fused_workspace,
        expert_workspace=cost.expert_workspace,
        fused_expert_workspace=cost.fused_expert_workspace,
        conversion=chunk.piece.conversion if chunk.piece else None,
        axis=chunk.piece.axis if chunk.piece else 0,
    )


def _inputs(arguments: list[int], weights: int) -> tuple[int, ...]:
    return tuple(position - weights for position in arguments if position >= weights)


def _buckets(arguments: list[int], layout: Layout) -> tuple[int, ...]:
    return tuple(
        index for index, group in enumerate(layout.groups) if not set(group).isdisjoint(arguments)
    )


def _specs(nodes: list[fx.Node]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec((), name_of(number_dtype(node))) if is_symbolic(node) else spec_of(value(node))
        for node in nodes
    )
