"""Hugging Face architectures train as they are: in stages, with their own loss, as PyTorch does."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Architecture
from draws import every
from plain_loop import plain_losses

import piper
from piper.errors import InputError
from piper.models.hugging_face import adapt_experts, has_experts

transformers = pytest.importorskip("transformers")
SGD = partial(torch.optim.SGD, lr=0.1)
STRATEGY = partial(piper.strategies.one_f_one_b, pp=2, microbatches=2)
MIXED = ("Mixtral", "Qwen3Moe", "Olmoe", "Deepseek", "GptOss")
USUAL = ("ViTForImageClassification",)


def build(one: Architecture) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, one.config)(**one.sizes)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = getattr(transformers, one.name)(config).double().eval()  # no dropout
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # they start at zero, and would hide what they do
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def use_experts(model: Any, reference: Any) -> None:
    """Experts that run in float64: Piper's own where they fit, against those of transformers."""
    if has_experts(model):
        reference.set_experts_implementation("eager")
        try:
            adapt_experts(model)
        except InputError:
            model.set_experts_implementation("batched_mm")


def check(one: Architecture, strategy: piper.Strategy) -> None:
    model, batches = build(one), [doubled(one.batch(seed)) for seed in range(2)]
    reference = copy.deepcopy(model)
    use_experts(model, reference)
    optimizer = SGD(reference.parameters())
    losses = plain_losses(optimizer, batches, lambda **batch: reference(**batch).loss)

    found = piper.rehearse(model, None, strategy, batches, optimizer=SGD, reduction="mean")

    assert found.losses == pytest.approx(losses, rel=1e-5)  # many compute the loss in float32
    compared = [name for name, _ in reference.named_parameters() if name in found.parameters]
    assert compared
    for name in compared:
        wanted = reference.get_parameter(name).detach()
        torch.testing.assert_close(found.parameters[name], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("one", [o for o in ARCHITECTURES if o.name in USUAL], ids=lambda o: o.name)
def test_an_architecture_trains_as_in_plain_pytorch(one: Architecture) -> None:
    check(one, STRATEGY())


@pytest.mark.soak
@pytest.mark.parametrize(
    "one", [o for o in ARCHITECTURES if o.name not in USUAL], ids=lambda o: o.name
)
def test_the_other_architectures_do_so_too(one: Architecture) -> None:
    check(one, STRATEGY())


WAYS = {"weights": {"tp": 2}, "tokens": {"cp": 2}, "ring": {"cp": 2, "cp_attention": "ring"}}


@pytest.mark.soak
@pytest.mark.parametrize("way", ["weights", "tokens"])
@pytest.mark.parametrize("one", ARCHITECTURES, ids=lambda o: o.name)
def test_an_architecture_is_divided_in_stages(one: Architecture, way: str) -> None:
    check(one, STRATEGY(**WAYS[way]))


MIXTURES = [o for o in ARCHITECTURES if o.name.startswith(MIXED)]


@pytest.mark.soak
@pytest.mark.parametrize("one", every(len(MIXTURES), MIXTURES), ids=lambda o: o.name)
def test_the_experts_of_a_mixture_are_divided(one: Architecture) -> None:
    """As `from_pretrained` adapts them: half of the experts on each of two devices."""
    check(one, STRATEGY(pp=1, dp=2, ep=2, zero=2))


def test_all_mixtures_of_the_page_are_divided() -> None:
    assert len(MIXTURES) == 6
