"""Put the experts of Hugging Face models in an EP region, without changing the models."""

from typing import Any

import torch
from torch import Tensor, nn

from piper.capture import annotate
from piper.errors import InputError
from piper.models.grouped import combine, grouped_mm, sort_by_expert

NAME = "piper"  # of this implementation, registered with transformers


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
    _require_plain(experts)
    model.set_experts_implementation(NAME)
    return model


def has_experts(model: nn.Module) -> bool:
    """Whether a model of transformers has experts whose implementation can be replaced."""
    switch = hasattr(model, "set_experts_implementation")
    return switch and any(map(_is_switchable, model.modules()))


def sorted_experts(self: Any, x: Tensor, expert: Tensor, score: Tensor) -> Tensor:
    """x [tokens, d], its experts and their scores [tokens, k] -> [tokens, d].

    `self` is a transformers module that keeps the weights of all experts in two parameters.
    """
    rows, order, inverse = sort_by_expert(x, expert)
    ids = expert.flatten()
    counts = ids.new_zeros(self.num_experts).scatter_add(0, ids, torch.ones_like(ids))
    with annotate("EP"):
        gated = self._apply_gate(grouped_mm(rows, _matrices(self, self.gate_up_proj), counts))
        rows = grouped_mm(gated, _matrices(self, self.down_proj), counts)
    return combine(rows, order, inverse, score).to(x.dtype)


def _matrices(experts: Any, weight: Tensor) -> Tensor:
    """As [experts, in, out]. Most models of transformers keep them transposed."""
    return weight if experts.is_transposed else weight.transpose(1, 2)


def _register() -> None:
    """Import transformers, which is an optional extra, when it is first needed."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        raise _refused(
            "it needs transformers 5 or later", 'pip install "piper-train[hf]"'
        ) from None
    ALL_EXPERTS_FUNCTIONS.register(NAME, sorted_experts)


def _is_switchable(module: nn.Module) -> bool:
    """transformers' decorator sets these on every class of experts that it can replace."""
    return all(hasattr(module, name) for name in ("num_experts", "is_transposed", "down_proj"))


def _require_plain(experts: list[nn.Module]) -> None:
    """A bias or norm per expert would need each row's expert inside the region."""
    for module in experts:
        extras = ("has_bias", "has_post_expert_norm")
        if not module.has_gate or any(getattr(module, name, False) for name in extras):
            raise _refused(
                f"{type(module).__name__} has more than two matrices and a gate",
                "use a model whose experts have a gate, and no bias or norm",
            )


def _refused(what: str, fix: str) -> InputError:
    return InputError.of("adapt_experts", what, fix)
