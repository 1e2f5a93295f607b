"""Every private API of transformers and of modules that models use."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn


def initialise(model: Any, module: nn.Module) -> None:
    """Fill a module of a transformers model with its initial values."""
    model._init_weights(module)


def usual_model_class(transformers: Any, config: Any) -> type[nn.Module] | None:
    """The language model of a configuration, if there is one."""
    both = getattr(config, "is_encoder_decoder", False)
    auto = transformers.AutoModelForSeq2SeqLM if both else transformers.AutoModelForCausalLM
    return auto._model_mapping.get(type(config), None)


def initialiser(model: nn.Module, path: str) -> nn.Module:
    """The model that initialises a module: the innermost around it, such as that of the text."""
    import transformers

    around, found = model, model
    for name in path.split(".") if path else ():
        around = getattr(around, name)
        found = around if isinstance(around, transformers.PreTrainedModel) else found
    return found


@contextmanager
def real_parameters(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Inside, the module's own parameters have memory, and are NaN. All others have none, so that
    nothing is drawn for them. The module itself stays: code may ask which one it is.
    """
    before = module._parameters
    module._parameters = {
        name: None if one is None else nn.Parameter(unfilled(one), requires_grad=one.requires_grad)
        for name, one in before.items()
    }
    try:
        yield module._parameters
    finally:
        module._parameters = before


def unfilled(one: Tensor) -> Tensor:
    kind = one.is_floating_point() or one.is_complex()
    return torch.full_like(one, float("nan") if kind else 0, device="cpu")


def with_children(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of a module, with some other children."""
    real = copy.copy(module)
    real._modules = {**module._modules, **children}
    return real


def experts_implementation(module: Any) -> str | None:
    """The name of the implementation that a module of experts runs."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def conversions_of(model: nn.Module) -> list[Any]:
    """How names and tensors of files become those of a model; none in an older transformers."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return list(get_model_conversion_mapping(model))


def converters_of(conversions: list[Any]) -> tuple[list[Any], list[Any]]:
    """Those that only rename, and those that compute."""
    converters = [one for one in conversions if hasattr(one, "operations")]
    return [one for one in conversions if not hasattr(one, "operations")], converters


def in_natural_order(names: Iterable[str]) -> list[str]:
    """As transformers reads them: expert 2 before expert 10."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def name_in_model(
    name: str, conversions: list[Any], prefix: str, known: Mapping[str, Any]
) -> tuple[str, str | None]:
    """Of a tensor in a file; and the pattern of the converter that takes it, if there is one."""
    from transformers.core_model_loading import rename_source_key

    renamed, pattern = rename_source_key(name, *converters_of(conversions), prefix, known)
    if renamed not in known and name in known:
        return name, None
    return renamed, pattern


def reverted(model: Any, used: list[Any] | None, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `save_pretrained` names and divides tensors of a model that was read by conversions."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return tensors
    if used is None:
        return revert_weight_conversion(model, tensors)
    with patch.object(model, "_weight_conversions", used, create=True):
        return revert_weight_conversion(model, tensors)


def unread_names(model: nn.Module) -> list[str]:
    """Patterns of names in files that a model does not need, such as heads of other tasks."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
