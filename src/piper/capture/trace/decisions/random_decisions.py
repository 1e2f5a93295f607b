"""Decisions by a random number, such as `if torch.rand([]) < p` of layer drop, in one trace.

A decision that is always the same is a constant. Any other has an answer that the caller gives. It
leaves a mark in the graph, so that traces with other answers can be compared (`both_ways`).
"""

from typing import Any

import torch
from torch import Tensor

from piper.capture import refusals
from piper.capture.source_lines import current_line

_DRAWN = ("rand", "randn", "randint")
_FILLED = ("bernoulli_", "uniform_", "normal_", "random_", "exponential_")
_BEGIN = {*_DRAWN, *_FILLED}
_COMPARED = {  # whether a number in [0, 1) is always, or never, below, above, ... the other
    "lt": (lambda p: p >= 1, lambda p: p <= 0),
    "le": (lambda p: p >= 1, lambda p: p < 0),
    "gt": (lambda p: p < 0, lambda p: p >= 1),
    "ge": (lambda p: p <= 0, lambda p: p >= 1),
}


class RandomDecisions(torch.overrides.TorchFunctionMode):
    """Answers `bool(number)` if the number is computed from random numbers alone.

    `answers`: of the first decisions; `default` is that of all others.
    """

    def __init__(self, answers: tuple[bool, ...] = (), default: bool = False) -> None:
        super().__init__()
        self.answers, self.default = answers, default
        self.uniform: dict[int, Tensor] = {}  # single numbers from torch.rand, by id
        self.drawn: dict[int, Tensor] = {}  # those, and all that is computed from them alone
        self.marks: list[Tensor] = []  # a copy of each number that was decided by, at its place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self.drawn and name not in _BEGIN:  # so it is nearly always: torch calls itself
            return func(*args, **(kwargs or {}))
        plain = name.strip("_")
        if plain in ("bool", "item") and id(args[0]) in self.drawn:
            return self.decide(args[0]) if plain == "bool" else DrawnNumber(self, args[0])
        if plain in _COMPARED and self.is_uniform(args) and not kwargs:
            always, never = _COMPARED[plain]
            if always(args[1]) or never(args[1]):
                return bool(always(args[1]))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and self.is_random(name, args, result):
            self.drawn[id(result)] = result
            if func is torch.rand:
                self.uniform[id(result)] = result
        return result

    def decide(self, number: Tensor) -> bool:
        self.marks.append(number.clone())
        index = len(self.marks) - 1
        return self.answers[index] if index < len(self.answers) else self.default

    def is_random(self, name: str, args: tuple[Any, ...], result: Tensor) -> bool:
        given = [arg for arg in args if isinstance(arg, Tensor)]
        if name in _DRAWN:
            return not given and result.numel() == 1
        if name in _FILLED:
            return len(given) == 1 and result.numel() == 1
        # Dynamo traces this inside torch.cond, and that of torch 2.11 knows no bool of a list
        return len(given) > 0 and all(id(arg) in self.drawn for arg in given)

    def is_uniform(self, args: tuple[Any, ...]) -> bool:
        return len(args) == 2 and isinstance(args[1], int | float) and id(args[0]) in self.uniform


class DrawnNumber:
    """A random number that Python asked for by `.item()`. It can only be compared."""

    def __init__(self, mode: RandomDecisions, number: Tensor) -> None:
        self.mode, self.number = mode, number

    def __bool__(self) -> bool:  # torch asks for it, too, for the bool of a tensor
        return self.mode.decide(self.number)

    def __lt__(self, other: Any) -> bool:
        return bool(self.number < other)

    def __le__(self, other: Any) -> bool:
        return bool(self.number <= other)

    def __gt__(self, other: Any) -> bool:
        return bool(self.number > other)

    def __ge__(self, other: Any) -> bool:
        return bool(self.number >= other)

    def wanted(self, *args: Any, **kwargs: Any) -> Any:
        raise refusals.drawn_value(current_line())

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = wanted
    __rtruediv__ = __floordiv__ = __pow__ = __rpow__ = __neg__ = __abs__ = __float__ = wanted
    __int__ = __index__ = __round__ = __format__ = __eq__ = __ne__ = __hash__ = wanted

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise refusals.drawn_value(current_line())
