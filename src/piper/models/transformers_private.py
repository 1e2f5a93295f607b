"""Every private API of transformers and of modules that models use."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def initialise(model: Any, module: nn.Module) -> None:
    """Fill a module of a transformers model with its initial values."""
    model._init_weights(module)


def causal_model_class(transformers: Any, config: Any) -> type[nn.Module] | None:
    """The causal language model of a configuration, if there is one."""
    known = transformers.AutoModelForCausalLM._model_mapping
    return known.get(type(config), None)


def bare_copy(module: nn.Module) -> nn.Module:
    """A copy of a module, without its children, whose parameters have memory."""
    real = copy.copy(module)
    real._modules = {}
    real._parameters = {
        name: None if one is None else nn.Parameter(torch.zeros_like(one, device="cpu"))
        for name, one in module._parameters.items()
    }
    return real


def with_children(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of a module, with some other children."""
    real = copy.copy(module)
    real._modules = {**module._modules, **children}
    return real


def experts_implementation(module: Any) -> str | None:
    """The name of the implementation that a module of experts runs."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)
