"""The initial value of every parameter: the same under every strategy."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from piper.errors import CaptureError

Init = Callable[[str, torch.Tensor], None]


def initial_values(
    model: torch.nn.Module,
    seed: int,
    init: Init | None = None,
    master: torch.dtype | None = None,
    more: Mapping[str, torch.Tensor] | None = None,
) -> Callable[[str], torch.Tensor]:
    """A function from the name of a parameter or buffer to its initial value, in its own memory.

    A model with real weights provides them. For a model on `meta`, `init(name, empty)` fills them,
    or else the module's own `reset_parameters`, seeded by the module's path. So a parameter starts
    the same on every device and in every order. Trained parameters start as masters of that type.
    `more` has real tensors that are not the model's.
    """
    tensors = {**named_tensors(model), **(more or {})}

    def get(name: str) -> torch.Tensor:
        tensor = tensors[name]
        trained = tensor.requires_grad and tensor.is_floating_point()
        return own(name).to(master) if trained else own(name)

    def own(name: str) -> torch.Tensor:
        tensor = tensors[name].detach()
        if not tensor.is_meta:
            return tensor.clone(memory_format=torch.contiguous_format)
        if init is not None:
            made = torch.empty_like(tensor, device="cpu")
            init(name, made)
            return made
        return reset(model, name, seed)

    return own if master is None else get


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and tensors in other attributes: capture may make these buffers."""
    named: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    for path, module in model.named_modules():
        named += [(f"{path}.{name}".lstrip("."), value) for name, value in vars(module).items()]
    return {name: value for name, value in named if isinstance(value, torch.Tensor)}


def reset(model: torch.nn.Module, name: str, seed: int) -> torch.Tensor:
    """Let the module that owns a parameter initialise a real copy of itself."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if not callable(getattr(module, "reset_parameters", None)):
        raise CaptureError.of(
            f"parameter {name}",
            f"it has no value, and {type(module).__name__} has no reset_parameters()",
            "build the model on the CPU, or give Trainer init=function(name, tensor)",
        )
    real = copy.deepcopy(module).to_empty(device="cpu")
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        real.reset_parameters()
    return getattr(real, leaf).detach()
