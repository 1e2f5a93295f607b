"""Values that a model computes from many rows at once, and what becomes of its results if they
were others.

A guard such as `x.abs().amax().clamp(min=3)` shows nothing on most data. So in a run on numbers,
results of reductions over rows are replaced by others, as other rows might have given them.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper.capture.source_lines import current_line
from piper.capture.torch_private import (
    HigherOrderOperator,
    TorchDispatchMode,
    pytree,
    storage_id,
    writes,
)

Shape = tuple[int, ...]
LIKE = ("_like", "new_empty", "new_full", "new_ones", "new_zeros")  # names end so: only sizes count


@dataclass(frozen=True, slots=True)
class CallSizes:
    """What one call of an operator got, and gave."""

    operator: Any
    given: tuple[Shape, ...]
    made: tuple[Shape, ...]

    @staticmethod
    def of(operator: Any, given: Any, made: Any) -> "CallSizes":
        sizes = (tuple([one.shape for one in tensors(x)]) for x in (given, made))
        return CallSizes(operator, *sizes)


Place = tuple[Any, int]  # an operator, and how often it was called before
Reductions = dict[int, Place]  # by their number among all calls


def reductions(whole: Sequence[CallSizes], part: Sequence[CallSizes]) -> Reductions:
    """Which calls give as much for more rows: their results are of all rows together.

    None are known if the calls differ, as in a loop over rows.
    """
    if [one.operator for one in whole] != [one.operator for one in part]:
        return {}
    times, found = Counter[Any](), Reductions()
    for k, (a, b) in enumerate(zip(whole, part, strict=True)):
        if a.made == b.made and a.given != b.given:
            found[k] = (a.operator, times[a.operator])
        times[a.operator] += 1
    return found


class OtherValues(TorchDispatchMode):
    """Moves the results of some calls, if they depend on the `batch`.

    By `shift` times their size, or to zero; truths are turned over, some or all. More rows can only
    make `all` false and `any` true: a model may skip its mask if no row has padding. Counts for
    each of several things, as those of tokens for experts, stay as they are: other results belong
    to them.
    """

    supports_higher_order_operators = True

    def __init__(
        self, batch: Collection[Tensor], places: Collection[Place], shift: float | None
    ) -> None:
        super().__init__()
        self.places, self.shift, self.times = places, shift, Counter[Any]()
        self.alive = list(batch)  # identifiers of storages are used again for others
        self.following = {storage_id(one) for one in batch}
        self.lines: list[str] = []  # of the calls whose results were moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        found, place = func(*args, **(kwargs or {})), (func, self.times[func])
        self.times[func] += 1
        name = func.overloadpacket.__name__
        follows = any(storage_id(one) in self.following for one in tensors((args, kwargs)))
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or (follows and not name.endswith(LIKE)):
            self._follow(found)
            if place in self.places:
                return self._moved(found, name, writes(func))
        return found

    def _follow(self, found: Any) -> None:
        self.alive += tensors(found)
        self.following.update(map(storage_id, tensors(found)))

    def _moved(self, found: Any, name: str, in_place: bool) -> Any:
        if is_final(found, name):
            return found
        self.lines.append(current_line() or "a line that is not in your files")
        if in_place:
            for one in tensors(found):
                one.copy_(other_value(one, self.shift))
            return found
        made = pytree.tree_map_only(Tensor, lambda one: other_value(one, self.shift), found)
        self._follow(made)
        return made


def is_final(found: Any, name: str) -> bool:
    """Whether more rows give the same: one row decides that not all are, or that any is."""
    if name not in ("all", "any") or not isinstance(found, Tensor) or found.dim():
        return False
    return bool(found) is (name == "any")


def other_value(one: Tensor, shift: float | None) -> Tensor:
    """Without a shift, zero."""
    if one.dtype is torch.bool:
        return ~one if shift is None or one.numel() < 2 else one ^ every_other(one)
    if shift is None:
        return one * 0 if one.is_floating_point() or not one.dim() else one
    if one.is_floating_point() or one.is_complex():
        size = one.detach().abs().nan_to_num(1.0, 1.0, 1.0).max() if one.numel() else 1.0
        return one + shift * max(float(size), 1.0)
    return one if one.dim() else one + round(shift)


def every_other(one: Tensor) -> Tensor:
    """Some truths stay as they are: a mean over none of them is no number."""
    return (torch.arange(one.numel(), device=one.device) % 2 == 0).view(one.shape)


def tensors(found: Any) -> Iterator[Tensor]:
    """Those of an operator's arguments or results. There are many, and pytree would be slower."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple | list):
        for one in found:
            yield from tensors(one)
    elif isinstance(found, dict):
        yield from tensors([*found.values()])
