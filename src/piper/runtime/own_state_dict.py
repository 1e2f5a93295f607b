"""The state dict as a model itself makes it: with other names, with more, or with fewer entries.

Many models rename or convert what they save, by hooks or in a `state_dict` of their own. Then its
entries are no parameters under their names, and must be made of trained values again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.func import functional_call

Tensors = dict[str, torch.Tensor]


def state_dict_of(
    model: torch.nn.Module, trained: Callable[[Mapping[str, Any]], Tensors]
) -> Tensors:
    """What `model.state_dict()` would be with the values that `trained` has for such tensors."""
    found, own = model.state_dict(), tensors_of(model)
    if all(is_entry(name, value, own) for name, value in found.items()):
        return trained(found)
    return functional_call(Saving(model), {f"model.{n}": v for n, v in trained(own).items()}, ())


def tensors_of(model: torch.nn.Module) -> Tensors:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


def is_entry(name: str, value: Any, own: Tensors) -> bool:
    """Whether this is the model's tensor of this name, or no tensor at all."""
    if not isinstance(value, torch.Tensor):
        return True
    tensor = own.get(name)
    if tensor is None or (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        return False
    return tensor.data_ptr() == value.data_ptr() and tensor.stride() == value.stride()


class Saving(torch.nn.Module):
    """Called with other values, it saves those."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Any:
        return self.model.state_dict()
