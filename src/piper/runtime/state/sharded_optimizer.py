"""The user's optimizer, moved to the pieces of a shard."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piper.runtime.comm.flat_messages import Piece
from piper.runtime.optimizers.known_optimizers import (
    ELEMENTWISE,
    MakeOptimizer,
    Named,
    is_elementwise,
    is_known,
)
from piper.runtime.optimizers.user_optimizer import make_checked, refused
from piper.runtime.state.element_order import ElementOrder
from piper.runtime.torch_private import has_own_step

Held = Sequence[tuple[Piece, torch.nn.Parameter]]


@dataclass(frozen=True, slots=True)
class Cause:
    """What divides parameters, and what to write to have them whole."""

    what: str
    without: str


BY_ZERO = Cause("zero=1, 2 and 3 give it shards (`Shard` does, too)", "zero=0 and no `Shard`")
BY_SHARD = Cause("`Shard` (tp=, ep=) gives it a part of them", "no `Shard` (tp=1, ep=1)")


def sharded_optimizer(
    make: MakeOptimizer,
    wholes: Named,
    held: Held,
    orders: Sequence[ElementOrder],
    zero: bool = True,
) -> torch.optim.Optimizer:
    """The user's optimizer of whole parameters, moved to the pieces that are here.

    The user's function sees whole parameters with their names and initial values, as on one
    device, so it makes the same optimizer. `wholes` is emptied. `zero`: pieces are those of ZeRO.
    """
    cause = BY_ZERO if zero else BY_SHARD
    optimizer = make_checked(make, wholes)
    refuse_whole_tensors(optimizer, cause)
    move(optimizer, wholes, held, orders)
    refuse_kept(wholes, cause)
    return optimizer


def move(
    optimizer: torch.optim.Optimizer, wholes: Named, held: Held, orders: Sequence[ElementOrder]
) -> None:
    """Replace whole parameters by their pieces. Parameters without a piece here are left out."""
    here = {id(wholes[piece.tensor][1]): (piece, parameter) for piece, parameter in held}
    for piece, parameter in held:
        vars(parameter).update(vars(wholes[piece.tensor][1]))
    for group in optimizer.param_groups:
        given = group["params"]
        if "param_names" in group:
            pairs = zip(given, group["param_names"], strict=True)
            group["param_names"] = [name for p, name in pairs if id(p) in here]
        group["params"] = [here[id(p)][1] for p in given if id(p) in here]
    early = [(here.get(id(p)), p.shape, state) for p, state in optimizer.state.items()]
    optimizer.state.clear()
    for found, shape, state in early:
        if found is not None:
            piece, parameter = found
            optimizer.state[parameter] = cut(state, shape, piece, orders[piece.tensor])


def cut(
    state: dict[str, Any], shape: torch.Size, piece: Piece, order: ElementOrder
) -> dict[str, Any]:
    """The part of an optimizer's early state that belongs to a piece."""

    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == shape:
            return order.flat(value)[piece.start : piece.stop].clone()
        return value

    return {key: part(value) for key, value in state.items()}


def refuse_kept(wholes: Named, cause: Cause) -> None:
    """An optimizer that keeps references to whole parameters would train the wrong ones."""
    watched = [weakref.ref(parameter) for _, parameter in wholes]
    wholes.clear()
    if any(ref() is not None for ref in watched):
        gc.collect()
    if any(ref() is not None for ref in watched):
        raise refused(
            f"it keeps parameters besides those in param_groups, and {cause.what}",
            f"use {cause.without}, or look parameters up in param_groups at each step",
        )


def refuse_whole_tensors(optimizer: torch.optim.Optimizer, cause: Cause = BY_ZERO) -> None:
    """An optimizer that needs whole tensors (norms, factors) does not see them in a shard."""
    kind = type(optimizer)
    if is_known(optimizer) and (is_elementwise(kind) or getattr(optimizer, "elementwise", False)):
        return
    replaced = ", whose step was replaced," if has_own_step(optimizer) else ""
    raise refused(
        f"{kind.__name__}{replaced} may need whole parameters, and {cause.what}",
        f"use {cause.without}, or one of {', '.join(ELEMENTWISE)}; if it treats every element by "
        "itself, say so with the class attribute elementwise = True",
    )
