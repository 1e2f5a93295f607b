"""The user's optimizer, moved to the pieces of a shard."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
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


def sharded_optimizer(
    make: MakeOptimizer, wholes: Named, held: Held, orders: Sequence[ElementOrder]
) -> torch.optim.Optimizer:
    """The user's optimizer of whole parameters, moved to the pieces that are here.

    The user's function sees whole parameters with their names and initial values, as on one
    device, so it makes the same optimizer. `wholes` is emptied.
    """
    optimizer = make_checked(make, wholes)
    refuse_whole_tensors(optimizer)
    move(optimizer, wholes, held, orders)
    refuse_kept(wholes)
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


def refuse_kept(wholes: Named) -> None:
    """An optimizer that keeps references to whole parameters would train the wrong ones."""
    watched = [weakref.ref(parameter) for _, parameter in wholes]
    wholes.clear()
    if any(ref() is not None for ref in watched):
        gc.collect()
    if any(ref() is not None for ref in watched):
        raise refused(
            "it keeps parameters besides those in param_groups, and zero=1, 2 and 3 give it shards "
            "(`Shard` does, too)",
            "use zero=0 and no `Shard`, or look parameters up in param_groups at each step",
        )


def refuse_whole_tensors(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that needs whole tensors (norms, factors) does not see them in a shard."""
    kind = type(optimizer)
    if is_known(optimizer) and (is_elementwise(kind) or getattr(optimizer, "elementwise", False)):
        return
    replaced = ", whose step was replaced," if has_own_step(optimizer) else ""
    raise refused(
        f"{kind.__name__}{replaced} may need whole parameters, and zero=1, 2 and 3 give it shards "
        "(`Shard` does, too)",
        "use zero=0 and no `Shard`, or one of " + ", ".join(ELEMENTWISE) + "; if it treats every "
        "element by itself, say so with the class attribute elementwise = True",
    )
