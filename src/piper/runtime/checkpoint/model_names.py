"""The names of a model's tensors, as its state dict has them, and which of them are one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from piper.runtime.checkpoint.format.problems import refused

Names = Callable[[str], bool]  # which names are meant


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or buffer of a state dict. Tied parameters are one, with several names."""

    name: str  # the first one
    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def model_tensors(model: torch.nn.Module, only: Names | None = None) -> list[ModelTensor]:
    """In the order of the state dict, also of a model on `meta`; all, or those of some names."""
    refuse_no_function("only", only)
    kept = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in kept.items():
        if isinstance(tensor, torch.Tensor):
            names.setdefault(id(tensor), []).append(name)
    return [
        ModelTensor(first, tuple(every), kept[first].dtype, tuple(kept[first].shape))
        for every in names.values()
        for first in every[:1]
        if only is None or any(map(only, every))
    ]


def by_name(tensors: list[ModelTensor]) -> Mapping[str, ModelTensor]:
    return {name: one for one in tensors for name in one.names}


def refuse_no_function(name: str, given: object) -> None:
    """Of the names of tensors."""
    if given is not None and not callable(given):
        example = "name: name.startswith('head')" if name == "only" else "name: 'model.' + name"
        fix = f"give a function of a name: {name}=lambda {example}"
        raise refused(f"{name}={given!r} is not a function", fix)
