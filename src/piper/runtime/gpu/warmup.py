"""Run every kernel of a plan once, before anything is on its way.

On a GPU the first run of a kernel loads code and makes workspaces, and waits for the whole device
to do so. Were messages on their way then, for which others wait that wait for this device, nobody
would ever go on.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch

from piper.plan.instructions import Run, Shape
from piper.runtime.comm.gloo import empty
from piper.runtime.execute import Program

Result = tuple[str, str, int]  # of a region and phase, which one of all that it writes
Known = Callable[[str], tuple[tuple[Shape, ...], bool]]  # of a value: its tensors; is it a bundle?


def warm(program: Program, known: Known, experts: Container[str] = ()) -> None:
    """With zeros, and no rows where their number is not known; of `experts`, the first has all.

    What a region made is given to its later phases: only its kernel knows how that lies in memory.
    """
    runs = [one for one in program.plan.instructions if isinstance(one, Run)]
    maker = {name: (one.region, one.phase, k) for one in runs for k, name in enumerate(one.writes)}
    made: dict[Result | None, Any] = {}  # the same for all microbatches
    first = {(one.region, one.phase): one for one in reversed(runs)}  # of each, backwards
    with torch.no_grad(), torch.autocast(program.device.type, enabled=False):
        for (region, phase), one in reversed(first.items()):
            kernel = program.kernels(region, phase)
            given = [made.get(maker.get(n)) or zeros(program, known, n) for n in one.reads]
            found = kernel(*(all_to_first(given) if region in experts else given))
            bundles = [(k, tuple(value)) for k, value in enumerate(found) if is_bundle(value)]
            made |= {(region, phase, k): bundle for k, bundle in bundles}
    if program.device.type == "cuda":
        torch.cuda.synchronize()


def is_bundle(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0


def all_to_first(given: list[Any]) -> list[Any]:
    """Rows, and how many each expert has: these must agree."""
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    rows = max((t.shape[0] for t in tensors if t.dim() > 1), default=0)
    for counts in tensors:
        if counts.dim() == 1 and not counts.is_floating_point():
            counts[:1] = rows
    return given


def zeros(program: Program, known: Known, name: str) -> Any:
    """Something like what a buffer will hold."""
    shapes, bundle = known(name)
    tensors = [empty([s or 0 for s in sizes], kind, program.device) for sizes, kind in shapes]
    for tensor in tensors:
        tensor.zero_()
    return tensors if bundle or len(tensors) != 1 else tensors[0]
