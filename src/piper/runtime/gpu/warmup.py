"""Run every kernel of a plan once, before any message is in flight.

On a GPU, the first run of a kernel loads code and allocates workspaces, which synchronizes the
whole device. If messages were in flight then, and their peers waited for this device, that would be
a deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from piper.plan.analyse.kernel_sequences import KernelSequence
from piper.plan.instructions import Buffers, Fetch, Plan, Run, Shape, Store
from piper.runtime.comm.gloo import empty
from piper.runtime.execute import Kernel, Program
from piper.runtime.joined_runs import Joins, joined_parts

Result = tuple[object, int]  # of a call, and its number
Known = Callable[
    [str], tuple[tuple[Shape, ...], bool]
]  # value -> its tensors; whether it is a bundle


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a kernel: of a run, or of several at once."""

    what: object  # the same for all microbatches
    kernel: Callable[[], Kernel]
    reads: Buffers
    writes: Buffers
    regions: tuple[str, ...]


def warm(
    program: Program, known: Known, experts: Container[str] = (), joins: Joins | None = None
) -> None:
    """Run all kernels on zeros. Dynamic sizes are 0, and the first of `experts` gets all tokens.

    Bundles that a region returns go to its later phases: only its kernel knows their layout. These
    come right behind it, and bundles are freed then, so that this takes less memory than a step.
    Kernels must see the layouts of a step here. cuDNN plans an attention backward for the layout of
    the first output that it meets, and uses that plan for any other: its gradients are then wrong.
    """
    found = list(calls(program, joins))
    stored = dict(copies(program.plan))
    maker = {name: (one.what, k) for one in found for k, name in enumerate(one.writes)}
    made: dict[Result | None, Any] = {}  # shared by all microbatches
    first: dict[object, Call] = {}
    for one in found:  # in the order of first calls, so that a forward comes before its backward
        first.setdefault(one.what, one)
    sources = {
        what: [maker.get(stored.get(name, name)) for name in one.reads]
        for what, one in first.items()
    }
    bundled = {
        what: [key for key, name in zip(keys, first[what].reads, strict=True) if known(name)[1]]
        for what, keys in sources.items()
    }
    with torch.no_grad(), torch.autocast(program.device.type, enabled=False):
        for what, left in behind_makers(bundled):
            one = first[what]
            pairs = zip(sources[what], one.reads, strict=True)
            given = [made.get(key) or zeros(program, known, name) for key, name in pairs]
            of_experts = any(region in experts for region in one.regions)
            results = one.kernel()(*(all_to_first(given) if of_experts else given))
            bundles = [(k, tuple(value)) for k, value in enumerate(results) if is_bundle(value)]
            made |= {(what, k): bundle for k, bundle in bundles}
            made = {key: bundle for key, bundle in made.items() if key in left}
            del given, results, bundles
    if program.device.type == "cuda":
        torch.cuda.synchronize()


def behind_makers(
    bundled: Mapping[object, Sequence[Result | None]],
) -> Iterator[tuple[object, set[Result | None]]]:
    """All calls, each right behind the last one that makes a bundle it reads, if any.

    With each comes what others still read. `bundled`: what each call reads of others.

    >>> [what for what, _ in behind_makers({"F0": [], "F1": [], "B1": [("F1", 0)]})]
    ['F0', 'F1', 'B1']
    >>> order = behind_makers({"F0": [], "F1": [], "B1": [("F1", 0)], "B0": [("F0", 0)]})
    >>> [(what, sorted(left)) for what, left in order][:2]
    [('F0', [('F0', 0), ('F1', 0)]), ('B0', [('F1', 0)])]
    """
    readers: dict[object, list[object]] = {}
    for what, keys in bundled.items():
        for key in keys:
            readers.setdefault(key and key[0], []).append(what)
    done: set[object] = set()
    left = Counter(key for keys in bundled.values() for key in keys)
    for call in bundled:
        ready = [call]
        while ready:
            what = ready.pop()
            makers = {key[0] for key in bundled[what] if key}
            if what in done or not makers <= done:
                continue
            done.add(what)
            left.subtract(bundled[what])
            yield what, {key for key, count in left.items() if count > 0}
            ready += reversed(readers.get(what, []))


def copies(plan: Plan) -> Iterator[tuple[str, str]]:
    """Values that come back from the host, and what they were before."""
    stored = {one.into: one.value for one in plan.instructions if isinstance(one, Store)}
    for one in plan.instructions:
        if isinstance(one, Fetch):
            yield one.into, stored.get(one.value, one.value)


def calls(program: Program, joins: Joins | None) -> Iterator[Call]:
    """All calls of a step, in order."""
    code = program.plan.instructions
    everything = range(len(code))
    for part in everything if joins is None else joined_parts(program.plan, everything, joins):
        one = code[part] if isinstance(part, int) else part
        if isinstance(one, Run):
            kernel = partial(program.kernels, one.region, one.phase)
            yield Call((one.region, one.phase), kernel, one.reads, one.writes, (one.region,))
        elif isinstance(one, KernelSequence) and joins is not None:
            regions = tuple(run.region for run in one.runs)
            what = regions, one.runs[0].phase, one.wiring
            yield Call(what, partial(joins.kernel, one), one.reads, one.writes, regions)


def is_bundle(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0


def all_to_first(given: list[Any]) -> list[Any]:
    """Set the token counts of experts, which must match the number of tokens."""
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    count = max((t.shape[0] for t in tensors if t.dim() > 1), default=0)
    for counts in tensors:
        if counts.dim() == 1 and not counts.is_floating_point():
            counts[:1] = count
    return given


def zeros(program: Program, known: Known, name: str) -> Any:
    """Zeros with the shapes of a buffer."""
    shapes, bundle = known(name)
    tensors = [empty([s or 0 for s in sizes], kind, program.device) for sizes, kind in shapes]
    for tensor in tensors:
        tensor.zero_()
    return tensors if bundle or len(tensors) != 1 else tensors[0]
