"""The memory that a graph allocates while it runs."""

from collections.abc import Iterable

from torch import fx

from piper.capture.fx_nodes import storages, tensors_of, value
from piper.capture.kernels.overwriting import overwritten
from piper.capture.torch_private import storage_id
from piper.ir.model import Moments
from piper.names import F, Phase

Memory = dict[fx.Node, set[int]]  # the storages of each node, in the order of the graph


def count(module: fx.GraphModule, phase: Phase, without: Iterable[int] | None = None) -> int:
    """Bytes at the peak. A backward frees its kept tensors one by one.

    If it is compiled, it runs `without` the memory of some results, and chooses itself what
    overwrites what. Sizes that depend on data count as 0. Scratch memory of operations is not
    included.
    """
    return max(map(sum, moments(module, phase, without)), default=0)


def moments(
    module: fx.GraphModule, phase: Phase, without: Iterable[int] | None = None, experts: int = 0
) -> Moments:
    """Bytes at the moments that may be the peak: of tensors with a row for each of so many
    `experts` (the second number), and of all others.

    A device that holds a share of the experts has the same share of the former. So no moment is
    left out that is the peak for some share.
    """
    memory = {node: storages(node) for node in module.graph.nodes}
    if without is None:
        memory = _overwriting(memory)
    sizes, last, held = _sizes(memory), _last_uses(memory), _held(memory, phase)
    seen = {s for n, found in memory.items() if n.op == "placeholder" for s in found}
    sizes.update(dict.fromkeys(without or (), 0))
    of_experts = _with_rows(memory, experts) if experts else set[int]()
    live, seen_live = [0, 0], list[tuple[int, int]]()
    for position, found in enumerate(memory.values()):
        new = found - seen
        seen |= new
        for storage in new:
            live[storage in of_experts] += sizes[storage]
        seen_live.append((live[0], live[1]))
        for storage in last.get(position, set()) - held:
            live[storage in of_experts] -= sizes[storage]
    return highest(seen_live)


def highest(found: Iterable[tuple[int, int]]) -> Moments:
    """Those that have the largest sum with some share of their second number.

    >>> highest([(1, 5), (4, 1), (3, 1), (2, 4)])
    ((4, 1), (2, 4))
    """
    kept: list[tuple[int, int]] = []
    for one in sorted(set(found), key=lambda pair: (-pair[0], -pair[1])):
        if not kept or sum(one) > sum(kept[-1]):
            kept.append(one)
    return tuple(kept)


def _with_rows(nodes: Iterable[fx.Node], rows: int) -> set[int]:
    """The memory of tensors whose first dimension has this size."""
    tensors = (tensor for node in nodes for tensor in tensors_of(node) if tensor.dim())
    known = ((storage_id(tensor), tensor.shape[0]) for tensor in tensors)
    return {storage for storage, size in known if isinstance(size, int) and size == rows}


def _overwriting(memory: Memory) -> Memory:
    """The same, where results that overwrite something have its memory."""
    same: dict[int, int] = {}
    for node in memory:
        given = overwritten(node)
        if given is not None:
            (old,), (new,) = memory[given], memory[node]
            same[new] = same.get(old, old)
    return {node: {same.get(one, one) for one in found} for node, found in memory.items()}


def _sizes(nodes: Iterable[fx.Node]) -> dict[int, int]:
    found: dict[int, int] = {}
    for tensor in (tensor for node in nodes for tensor in tensors_of(node)):
        size = tensor.untyped_storage().nbytes()
        found[storage_id(tensor)] = size if isinstance(size, int) else 0
    return found


def _last_uses(memory: Memory) -> dict[int, set[int]]:
    """By position, the memory whose last use this is. Results have no last use."""
    last: dict[int, int] = {}
    for position, node in enumerate(memory):
        for used in (node, *node.all_input_nodes):
            last.update(dict.fromkeys(memory[used], position))
    ends: dict[int, set[int]] = {}
    for storage, position in last.items():
        if position < len(memory) - 1:
            ends.setdefault(position, set()).add(storage)
    return ends


def _held(memory: Memory, phase: Phase) -> set[int]:
    """Memory that the caller holds while the graph runs: inputs and parameters.

    The last bundle of a backward holds the tensors kept for it. The backward frees them itself.
    """
    arguments = [node for node in memory if node.op == "placeholder"]
    bundles = [node for node in arguments if isinstance(value(node), tuple)]
    own = bundles[-1:] if phase is not F else []
    return {storage for node in arguments if node not in own for storage in memory[node]}
