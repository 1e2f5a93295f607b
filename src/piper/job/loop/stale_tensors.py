"""Parameters and buffers of a model that is trained elsewhere: their values are old.

A moving average, weight clipping or a target network that a loop writes by hand would read or write
them, and training would not notice. Any use of their values is told to somebody. What does not
depend on values, such as sizes and devices, may be read.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from piper.capture.torch_private import as_plain_tensors
from piper.job.loop.waiting_model import plain_tensors

HARMLESS = frozenset((
    "shape", "device", "dtype", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim",
    "layout", "names", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse",
    "is_quantized", "is_nested", "itemsize", "nbytes", "output_nr", "name", "_base",
    "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "size",
    "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "storage_offset", "data_ptr",
    "untyped_storage", "get_device", "is_pinned", "is_shared", "is_inference",
    "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook",
    "__len__", "__hash__",
))  # fmt: skip
SET = ("requires_grad",)  # the next step refuses it, with a message of its own

_MARKED: WeakSet[StaleTensors] = WeakSet()


def clear_all() -> None:
    """Before Piper uses a model: its loss may read one that another Trainer trains."""
    for one in list(_MARKED):
        one.clear()


class StaleTensors:
    """While they are marked, `tell` is called whenever something uses their values, and `gradients`
    whenever something reads a gradient that they do not have."""

    def __init__(
        self,
        model: nn.Module,
        tell: Callable[[], None],
        gradients: Callable[[], None] = lambda: None,
    ) -> None:
        self.tensors = [(one, type(one)) for one in plain_tensors(model)]
        self.kinds = {kind: stale_kind(kind, tell, gradients) for kind in (Tensor, nn.Parameter)}
        self.marked = False

    def mark(self) -> None:
        if not self.marked:
            self.marked = True
            _MARKED.add(self)
            for tensor, kind in self.tensors:
                tensor.__class__ = self.kinds[kind]

    def clear(self) -> None:
        if self.marked:
            self.marked = False
            _MARKED.discard(self)
            for tensor, kind in self.tensors:
                tensor.__class__ = kind


def stale_kind(kind: type, tell: Callable[[], None], gradients: Callable[[], None]) -> type:
    """Tensors become of this kind in place, so that it counts for all who have them."""

    def function(
        cls: type,
        call: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if name_of(call) not in HARMLESS:
            tell()
        with as_plain_tensors():
            found = call(*args, **(kwargs or {}))
        if found is None and name_of(call) == "grad":
            gradients()
        return found

    def plain(self: Tensor) -> Tensor:
        """Of the usual kind, in the same memory."""
        tell()
        with as_plain_tensors():
            found = self.detach()
        return nn.Parameter(found, self.requires_grad) if kind is nn.Parameter else found

    methods = {
        "__torch_function__": classmethod(function),
        "__deepcopy__": lambda self, memo: memo.setdefault(id(self), deepcopy(plain(self))),
        "__reduce_ex__": lambda self, protocol: plain(self).__reduce_ex__(protocol),
    }
    return type(kind.__name__, (kind,), methods)


def name_of(call: Any) -> str:
    """Of a function, or of the attribute that it reads, or sets without a use of values."""
    name = getattr(call, "__name__", "")
    owner = getattr(getattr(call, "__self__", None), "__name__", "")
    return owner if name == "__get__" or (name == "__set__" and owner in SET) else name
