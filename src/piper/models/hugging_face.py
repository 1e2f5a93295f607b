"""Put the experts of Hugging Face models in an EP region, without changing the models."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import annotate
from piper.errors import InputError
from piper.models.grouped import combine, grouped_mm, sort_by_expert
from piper.models.transformers_private import experts_implementation

NAME = "piper"  # of this implementation, registered with transformers
COLUMNS = 8  # of ones, for a bias: 16 bytes in bfloat16


def adapt_experts(model: nn.Module) -> nn.Module:
    """Put the experts of a transformers model (Mixtral, Qwen3-MoE, ...) in a region EP.

    Rows are sorted by expert. The region holds only the experts and reads the rows and a count for
    each expert, so `Shard` can divide it. No weight changes. Returns the model.
    """
    _register()
    experts = [module for module in model.modules() if _is_switchable(module)]
    if not experts or not hasattr(model, "set_experts_implementation"):
        raise _refused(
            f"{type(model).__name__} has no experts whose implementation transformers can replace",
            "give a model built by transformers, such as Mixtral or Qwen3-MoE, or annotate "
            'the experts of your own model: with annotate("EP")',
        )
    _require_plain(model)
    model.set_experts_implementation(NAME)
    return model


def has_experts(model: nn.Module) -> bool:
    """Whether a model of transformers has experts whose implementation can be replaced."""
    switch = hasattr(model, "set_experts_implementation")
    return switch and any(map(_is_switchable, model.modules()))


def unadapted_experts(model: nn.Module) -> str | None:
    """The path of the first experts that run as transformers runs them, if there are any."""
    found = ((path, one) for path, one in model.named_modules() if _is_switchable(one))
    return next((path for path, one in found if experts_implementation(one) != NAME), None)


def sorted_experts(self: Any, x: Tensor, expert: Tensor, score: Tensor) -> Tensor:
    """x [tokens, d], its experts and their scores [tokens, k] -> [tokens, d].

    `self` is a transformers module that keeps the weights of all experts in two parameters.
    """
    rows, order, inverse = sort_by_expert(x, expert)
    ids = expert.flatten()
    counts = ids.new_zeros(self.num_experts).scatter_add(0, ids, torch.ones_like(ids))
    with annotate("EP"):
        if self.has_gate:
            inner = self._apply_gate(_product(self, rows, "gate_up_proj", counts))
        else:
            inner = self.act_fn(_product(self, rows, "up_proj", counts))
        rows = _product(self, inner, "down_proj", counts)
    return combine(rows, order, inverse, score).to(x.dtype)


def _product(experts: Any, rows: Tensor, name: str, counts: Tensor) -> Tensor:
    """Rows times the matrix of their expert, plus its bias, if there is one.

    A bias is a matrix of one row, times a column of ones. So nothing needs the expert of each row.
    It gets more rows, which are zero: kernels want aligned rows.
    """
    weight = getattr(experts, name)
    matrices = weight if experts.is_transposed else weight.transpose(1, 2)  # [experts, in, out]
    found = grouped_mm(rows, matrices, counts)
    if experts.has_bias:
        bias = getattr(experts, f"{name}_bias").unsqueeze(1)
        ones = torch.ones_like(rows[:, :COLUMNS])
        found = found + grouped_mm(ones, functional.pad(bias, (0, 0, 0, ones.shape[1] - 1)), counts)
    return found


def _register() -> None:
    """Import transformers, which is an optional extra, when it is first needed."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        raise _refused(
            "it needs transformers 5 or later", "pip install 'transformers>=5'"
        ) from None
    ALL_EXPERTS_FUNCTIONS.register(NAME, sorted_experts)


def _is_switchable(module: nn.Module) -> bool:
    """transformers' decorator sets these on every class of experts that it can replace."""
    return all(hasattr(module, name) for name in ("num_experts", "is_transposed", "down_proj"))


def _require_plain(model: nn.Module) -> None:
    """A norm after each expert would need each row's expert inside the region."""
    for path, module in model.named_modules():
        if _is_switchable(module) and getattr(module, "has_post_expert_norm", False):
            raise _refused(
                f"{path} ({type(module).__name__}) has a norm after its experts",
                f'write `with piper.annotate("EP"):` around the products with the weights of '
                f"{path} in its forward, or train it without `ep`",
            )


def _refused(what: str, fix: str) -> InputError:
    return InputError.of("adapt_experts", what, fix)
