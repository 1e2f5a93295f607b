"""Decisions by a random number, such as `if torch.rand([]) < p`, that are always the same."""

from typing import Any

import torch
from torch import Tensor

from piper.capture.trace import refusals

_COMPARED = {  # whether a number in [0, 1) is always, or never, below, above, ... the other
    "lt": (lambda p: p >= 1, lambda p: p <= 0),
    "le": (lambda p: p >= 1, lambda p: p < 0),
    "gt": (lambda p: p < 0, lambda p: p >= 1),
    "ge": (lambda p: p <= 0, lambda p: p >= 1),
}


class LayerDrop(torch.overrides.TorchFunctionMode):
    """With a probability of 0 or 1, a comparison is a constant. Otherwise `if` is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []  # single numbers from torch.rand
        self.compared: list[tuple[Tensor, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if name in ("bool", "item") and args and (p := self.probability(args[0])) is not None:
            raise refusals.layer_drop(p)
        if name in _COMPARED and self.is_drawn(args) and not kwargs:
            always, never = _COMPARED[name]
            if always(args[1]) or never(args[1]):
                return bool(always(args[1]))
            result = func(*args)
            self.compared.append((result, f"{name} {args[1]:g}"))
            return result
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and isinstance(result, Tensor) and result.numel() == 1:
            self.drawn.append(result)
        return result

    def is_drawn(self, args: tuple[Any, ...]) -> bool:
        numbers = len(args) == 2 and isinstance(args[1], int | float)
        return numbers and any(args[0] is one for one in self.drawn)

    def probability(self, tensor: Any) -> Any:
        return next((p for one, p in self.compared if one is tensor), None)
