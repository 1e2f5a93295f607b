"""The operator of a conversion between placements: a message, which the runtime sends.

It stands in graphs so that regions on both sides are differentiated as any others. Its own region
has no kernel.
"""

from typing import Any

import torch
from torch import Tensor

from piper.ir.placement.placements import Step

_library = torch.library.Library("piper", "FRAGMENT")
_library.define("convert(Tensor x, str forward, str backward, int ways) -> Tensor")

CONVERT = torch.ops.piper.convert.default


def _fake(x: Tensor, forward: str, backward: str, ways: int) -> Tensor:
    """Messages join or cut along dimension 0."""
    step = Step(forward)
    if step is Step.ALL_GATHER:
        return x.new_empty((x.shape[0] * ways, *x.shape[1:]))
    if step in (Step.REDUCE_SCATTER, Step.SLICE):
        return x.new_empty((x.shape[0] // ways, *x.shape[1:]))
    return x.new_empty(x.shape)


def _run(x: Tensor, forward: str, backward: str, ways: int) -> Tensor:
    raise AssertionError("a conversion is a message, and not a kernel")


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.forward, ctx.backward, ctx.ways = inputs


def _gradient(ctx: Any, gradient: Tensor) -> tuple:
    """The gradient takes the same way back."""
    return CONVERT(gradient, ctx.backward, ctx.forward, ctx.ways), None, None, None


_library.impl("convert", _fake, "Meta")
_library.impl("convert", _run, "CompositeExplicitAutograd")
torch.library.register_autograd("piper::convert", _gradient, setup_context=_remember, lib=_library)
