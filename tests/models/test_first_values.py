"""A configuration starts as transformers starts it, in every tested architecture."""

from __future__ import annotations

import math

import pytest
import torch
from architectures import ARCHITECTURES, GPT2, GROUPED, Architecture
from draws import one_of
from torch import Tensor, nn

from piper.errors import InputError
from piper.models import hugging_face_build
from piper.models.hugging_face_build import build_on_meta, first_values

transformers = pytest.importorskip("transformers")
LIKELY = 6  # so many times its standard error, what is drawn may be off


def filled(model: nn.Module) -> dict[str, Tensor]:
    fill, values = first_values(model, seed=3), {}
    for name, one in model.named_parameters():
        values[name] = torch.empty_like(one, device="cpu")
        fill(name, values[name])
    return values


def differs(found: Tensor, wanted: Tensor) -> bool:
    """Whether they are no draws from one distribution, as mean and deviation show."""
    found, wanted, n = found.double(), wanted.double(), wanted.numel()
    if wanted.unique().numel() <= 2 or n < 8:  # set, and not drawn
        return not torch.equal(found, wanted) and n >= 8
    scale = wanted.std()
    off = max(
        abs(found.std() / scale - 1.0) * math.sqrt(2), abs(found.mean() - wanted.mean()) / scale
    )
    return bool(off > LIKELY * math.sqrt(2 / n))


# Modules around their layers initialise these once more:
REINITIALISED = {"GPT2LMHeadModel", "MambaForCausalLM", "ModernBertForMaskedLM",
                 "T5ForConditionalGeneration", "WhisperForConditionalGeneration"}  # fmt: skip


CONSTRUCTED = [
    Architecture("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT2),
    Architecture("ApertusForCausalLM", "ApertusConfig", GROUPED),
    Architecture("xLSTMForCausalLM", "xLSTMConfig", {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4,
        "embedding_dim": 32, "num_blocks": 1,
    }),
]  # fmt: skip  # constructors of modules fill some parameters, or ask which module they are in


@pytest.mark.parametrize("given", CONSTRUCTED, ids=lambda one: one.name)
def test_what_constructors_fill_is_as_in_transformers(given: Architecture) -> None:
    test_parameters_start_as_those_of_transformers(given)


def test_a_large_model_is_not_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face_build, "LARGEST", 0)

    with pytest.raises(InputError, match="transformers fills transformer.h.0.attn.c_attn.weight"):
        filled(
            build_on_meta(transformers.OpenAIGPTLMHeadModel, transformers.OpenAIGPTConfig(**GPT2))
        )


@one_of(2)
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(
            one, id=one.name,
            marks=() if one.name in REINITIALISED or k % 4 == 0 else pytest.mark.soak,
        )
        for k, one in enumerate(ARCHITECTURES)
    ],
)  # fmt: skip
def test_parameters_start_as_those_of_transformers(given: Architecture) -> None:
    make, config = (
        getattr(transformers, given.name),
        getattr(transformers, given.config)(**given.sizes),
    )
    torch.manual_seed(0)
    wanted = dict(make(config).named_parameters())

    values = filled(build_on_meta(make, config))

    assert values.keys() == wanted.keys()
    assert [name for name in values if differs(values[name], wanted[name])] == []
