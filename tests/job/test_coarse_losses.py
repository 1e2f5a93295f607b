"""A model that computes its own loss in 16 bits is told so, and only then."""

from __future__ import annotations

import logging

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional

import piper

COARSE = "the model computes its own loss in bfloat16"


class Classifier(nn.Module):
    """`kind` says in which type it computes its loss, and what it returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 4), kind

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        output = self.layer(x)
        match self.kind:
            case "its own":
                return functional.cross_entropy(output, labels)
            case "its own, as [1]":
                return functional.cross_entropy(output, labels).view(1) * 0.5
            case "float32":
                return functional.cross_entropy(output.float(), labels)
            case _:
                return functional.cross_entropy(output.float(), labels) + output.float().mean()


@one_of(2)
@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("kind", ["its own", "its own, as [1]", "float32", "sum"])
def test_a_loss_in_16_bits_is_named(
    kind: str, precision: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    batch = torch.randn(8, 6), torch.randint(4, (8,))

    with caplog.at_level(logging.INFO, "piper"):
        piper.Trainer(Classifier(kind), None, example=batch, precision=precision).close()

    assert (COARSE in caplog.text) == (precision == "bf16" and "own" in kind)


def test_a_loss_function_gets_outputs_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    batch = torch.randn(8, 6), torch.randint(4, (8,))

    with caplog.at_level(logging.INFO, "piper"):
        given = nn.Linear(6, 4), functional.cross_entropy
        piper.Trainer(*given, example=batch, precision="bf16").close()

    assert COARSE not in caplog.text
