"""The optimizer of a shard: the user's own, on pieces of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from piper.errors import Problem, StrategyError
from piper.runtime.flat import Piece

MakeOptimizer = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD",
)  # fmt: skip


def sharded_optimizer(
    make: MakeOptimizer,
    names: Sequence[str],
    wholes: Sequence[torch.Tensor],
    held: Sequence[tuple[Piece, torch.nn.Parameter]],
) -> torch.optim.Optimizer | None:
    """What the user makes of whole parameters, then on the pieces that are here.

    The user's function sees parameters with their names and shapes (but without memory), so that
    groups chosen by them are those of one device.
    """
    stand_ins = [torch.nn.Parameter(whole) for whole in wholes]
    optimizer = make(list(zip(names, stand_ins, strict=True)))
    refuse_whole_tensors(optimizer)
    here = {id(stand_ins[piece.tensor]): (piece, parameter) for piece, parameter in held}
    for group in optimizer.param_groups:
        given = group["params"]
        if "param_names" in group:
            pairs = zip(given, group["param_names"], strict=True)
            group["param_names"] = [name for p, name in pairs if id(p) in here]
        group["params"] = [here[id(p)][1] for p in given if id(p) in here]
    early = {id(p): state for p, state in optimizer.state.items()}
    optimizer.state.clear()
    for stand_in in stand_ins:
        if id(stand_in) in early and id(stand_in) in here:
            piece, parameter = here[id(stand_in)]
            optimizer.state[parameter] = cut(early[id(stand_in)], stand_in.shape, piece)
    return optimizer if held else None


def cut(state: dict[str, Any], shape: torch.Size, piece: Piece) -> dict[str, Any]:
    """The part of an optimizer's early state that belongs to a piece."""

    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == shape:
            return value.flatten()[piece.start : piece.stop].clone()
        return value

    return {key: part(value) for key, value in state.items()}


def refuse_whole_tensors(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that looks at whole tensors (norms, factors) would not see them in a shard."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
    if not known and not getattr(kind, "elementwise", False):
        raise StrategyError(
            "optimizer",
            Problem(
                f"{kind.__name__} may need whole parameters, and zero=1, 2 and 3 give it shards",
                "use zero=0, or one of " + ", ".join(ELEMENTWISE) + "; if it treats every element "
                "by itself, say so with the class attribute elementwise = True",
            ),
        )
