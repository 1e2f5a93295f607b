"""Run every kernel of a plan once, before anything is on its way.

On a GPU the first run of a kernel loads code and makes workspaces, and waits for the whole device
to do so. Were messages on their way then, for which others wait that wait for this device, nobody
would ever go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piper.plan.instructions import Run, Shape
from piper.runtime.comm import empty
from piper.runtime.execute import Program

Known = Callable[[str], tuple[tuple[Shape, ...], bool]]  # of a value: its tensors; is it a bundle?


def warm(program: Program, known: Known) -> None:
    """With zeros, and no rows where their number is not known."""
    ran: dict[int, Any] = {}  # kept, so that no other kernel gets the same id
    with torch.no_grad(), torch.autocast(program.device.type, enabled=False):
        for one in program.plan.instructions:
            if isinstance(one, Run):
                kernel = program.kernels(one.region, one.phase)
                if id(kernel) not in ran:
                    ran[id(kernel)] = kernel
                    kernel(*[zeros(program, known, name) for name in one.reads])
    if program.device.type == "cuda":
        torch.cuda.synchronize()


def zeros(program: Program, known: Known, name: str) -> Any:
    """Something like what a buffer will hold."""
    shapes, bundle = known(name.removeprefix("sum ").partition("#")[0])
    tensors = [empty([s or 0 for s in sizes], kind, program.device) for sizes, kind in shapes]
    for tensor in tensors:
        tensor.zero_()
    return tensors if bundle or len(tensors) != 1 else tensors[0]
