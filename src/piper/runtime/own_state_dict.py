"""What a model itself saves and loads: with other names, with more or fewer entries, converted.

Many models have hooks, or a `state_dict` of their own. Then its entries are no parameters under
their names, and must be made of trained values again. Files are written and read by parts, which
such a model cannot do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import functional_call

from piper.errors import InputError
from piper.runtime.checkpoint.model_names import ModelTensor, Names, model_tensors
from piper.runtime.held_values import different, held_by
from piper.runtime.torch_private import extra_states, loads_in_its_own_way, pytree

Tensors = dict[str, torch.Tensor]
LARGE = 2**26  # elements of a model that is not copied to try how it loads


def state_dict_of(
    model: torch.nn.Module, trained: Callable[[Mapping[str, Any]], Tensors]
) -> dict[str, Any]:
    """What `model.state_dict()` would be with the values that `trained` has for such tensors."""
    found, own = model.state_dict(), tensors_of(model)
    if all(is_entry(name, value, own) for name, value in found.items()):
        return trained(found)
    if any(one.is_meta for one in own.values()):
        named = {f"model.{name}": value for name, value in trained(own).items()}
        return functional_call(Saving(model), named, ())
    with values(own, trained(own)):
        return {name: pytree.tree_map(plain, one) for name, one in model.state_dict().items()}


@contextmanager
def values(own: Tensors, others: Tensors) -> Iterator[None]:
    """Inside, the tensors themselves have other values: a model may keep them in lists as well."""
    before = {id(one): (one, one.data) for one in own.values()}
    try:
        for name, one in own.items():
            one.data = others[name]
        yield
    finally:
        for one, value in before.values():
            one.data = value


def plain(value: Any) -> Any:
    """An entry that stays as it is when the model gets its own values again."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def tensors_of(model: torch.nn.Module) -> Tensors:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


def is_entry(name: str, value: Any, own: Tensors) -> bool:
    """Whether this is the model's tensor of this name."""
    tensor = own.get(name)
    if tensor is None or not isinstance(value, torch.Tensor):
        return False
    if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        return False
    return tensor.data_ptr() == value.data_ptr() and tensor.stride() == value.stride()


class Saving(torch.nn.Module):
    """Called with other values, it saves those."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Any:
        return self.model.state_dict()


def exported_tensors(model: torch.nn.Module, only: Names | None = None) -> list[ModelTensor]:
    """The entries that can be written as they are."""
    own, extra = tensors_of(model), extra_states(model)
    for name, value in model.state_dict().items():
        if not is_entry(name, value, own) and name not in extra:
            raise InputError.of(
                "export",
                f"the model's state_dict has {name}, which is not its parameter or buffer of that "
                "name",
                "save what it makes itself: `weights = trainer.state_dict()` in all processes, "
                "which the first one writes",
            )
    return model_tensors(model, only)


def loaded_tensors(model: torch.nn.Module, only: Names | None = None) -> list[ModelTensor]:
    """The tensors that are loaded as they are in a file."""
    if loads_in_its_own_way(model) and (name := converted(model)):
        raise InputError.of(
            "load",
            f"the model itself may not load {name} as in a file: it has hooks, or a "
            "load_state_dict of its own",
            "load it before the Trainer is made: model.load_state_dict(...)",
        )
    return model_tensors(model, only)


def converted(model: torch.nn.Module) -> str:
    """The first tensor that a copy of the model does not load as it is; none: it loads all.

    What it loads besides must not change, either: a table that is made of weights, a teacher.
    """
    if sum(one.numel() for one in tensors_of(model).values()) > LARGE:
        return "all of its tensors"  # not tried
    tried = copy.deepcopy(model).to_empty(device="cpu")
    saved = {name for one in model_tensors(tried) for name in one.names}
    given = {name: one for name, one in tensors_of(tried).items() if name in saved}
    with torch.no_grad():
        for one in tensors_of(tried).values():
            one.zero_()
        wanted = drawn(given)
    others = [held_by(one, given.values()) for one in (tried, model)]
    tried.load_state_dict({name: one.clone() for name, one in wanted.items()}, strict=False)
    found = tensors_of(tried)
    if wrong := [name for name, one in wanted.items() if not torch.equal(found[name], one)]:
        return wrong[0]
    again = [held_by(one, given.values()) for one in (tried, model)]
    return next(
        (n for old, new in zip(others, again, strict=True) for n in different(old, new)), ""
    )


def drawn(tensors: Tensors) -> Tensors:
    """Other values in each element, of both signs, in all digits; equal ones for one tensor."""
    draw = torch.Generator().manual_seed(0)
    found: dict[int, torch.Tensor] = {}
    for one in tensors.values():
        if id(one) not in found:
            value = torch.randn(one.shape, generator=draw, dtype=torch.float64)
            scaled = value if one.is_floating_point() or one.is_complex() else value * 50
            found[id(one)] = scaled > 0 if one.dtype == torch.bool else scaled.to(one.dtype)
    return {name: found[id(one)] for name, one in tensors.items()}
