"""A configuration starts as transformers starts it, in every tested architecture."""

from __future__ import annotations

import math

import pytest
import torch
from architectures import ARCHITECTURES, Architecture
from torch import Tensor, nn

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
