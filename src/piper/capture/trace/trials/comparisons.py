"""Numbers that a model compares its values with, which those of the first batch may be far from.

And sizes of the tables that it looks up in, which indices must stay below.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from piper.capture.torch_private import HigherOrderOperator, TorchDispatchMode, named_arguments
from piper.capture.trace.trials.reduced_rows import tensors

COMPARED = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "isin", "clamp", "clamp_min", "clamp_max", "threshold",
    "hardtanh", "bucketize", "searchsorted",
})  # fmt: skip
SHIFTED = frozenset({"add", "sub", "rsub"})  # before `relu`, say; small numbers are other things
LOOKED_UP = {  # the dimension that indices belong to; None: a call says it
    "embedding": 0,
    "index": 0,
    "index_select": None,
    "gather": None,
    "scatter": None,
    "scatter_": None,
    "nll_loss_forward": 1,
    "nll_loss2d_forward": 1,
}
MISSING = frozenset({
    "isnan", "isinf", "isfinite", "nan_to_num", "nansum", "nanmean", "nanmedian", "nanquantile",
    "isposinf", "isneginf",
})  # fmt: skip
FEW = 16  # elements of a tensor of such numbers
MOST = 32  # of these numbers in all
LARGEST = 1e6


@dataclass
class Comparisons:
    """What the runs of one model have shown so far."""

    constants: dict[float, None] = field(default_factory=dict)  # in the order of calls
    tables: dict[int, None] = field(default_factory=dict)
    ignored: dict[int, None] = field(default_factory=dict)  # labels
    missing: bool = False  # whether it asks which numbers are NaN or infinite

    def see(self, operator: Any, args: Any, kwargs: Any) -> None:
        name = operator.overloadpacket.__name__
        self.missing |= name in MISSING or (name in ("eq", "ne") and asks_for_nan(args))
        if name in LOOKED_UP:
            self._look_up(name, named_arguments(operator, args, kwargs))
        elif name in COMPARED:
            self._add(numbers((args, kwargs)))
        elif name in SHIFTED:
            self._add(one for one in plain(args) if abs(one) > 2)

    def _look_up(self, name: str, given: dict[str, Any]) -> None:
        table = next(iter(given.values()))
        if "ignore_index" in given:
            self.ignored[given["ignore_index"]] = None
        dim = given.get("dim") if LOOKED_UP[name] is None else LOOKED_UP[name]
        if dim is not None and -table.dim() <= dim < table.dim():
            self.tables[table.shape[dim]] = None

    def _add(self, found: Iterator[float]) -> None:
        for one in found:
            if abs(one) <= LARGEST and len(self.constants) < MOST:
                self.constants[one] = None


class Comparing(TorchDispatchMode):
    """Keeps what is compared while it is open."""

    supports_higher_order_operators = True

    def __init__(self, comparisons: Comparisons) -> None:
        super().__init__()
        self.comparisons = comparisons

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, HigherOrderOperator):
            self.comparisons.see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def asks_for_nan(args: Any) -> bool:
    """`x != x`, or `x.abs() != inf`, as `isfinite` does."""
    one, other = args[:2]
    return one is other or (isinstance(other, float) and other == float("inf"))


def numbers(given: Any) -> Iterator[float]:
    """Those among the arguments of an operator, and in small tensors among them."""
    for one in tensors(given):
        if one.numel() <= FEW and not one.is_complex():
            yield from map(float, one.flatten().tolist())
    yield from (float(one) for one in plain(given))


def plain(given: Any) -> Iterator[float]:
    if isinstance(given, int | float) and not isinstance(given, bool):
        yield given
    elif isinstance(given, tuple | list | dict) and not isinstance(given, Tensor):
        for one in given.values() if isinstance(given, dict) else given:
            yield from plain(one)
