"""A loss function that fails says what it was given."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import capture


def swapped(labels: Tensor, output: Tensor) -> Tensor:
    """The typical mistake: a loss function gets the output first."""
    return functional.cross_entropy(output, labels)


def of_floats(output: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss(output, labels.float())


@pytest.mark.parametrize("loss_fn", [swapped, of_floats])
def test_the_error_names_the_loss_function_and_its_arguments(loss_fn: object) -> None:
    example = torch.randn(4, 6), torch.randint(3, (4,))

    with pytest.raises(Exception) as error:
        capture(nn.Linear(6, 3), loss_fn, example)  # type: ignore[arg-type]

    notes = "\n".join(error.value.__notes__)
    assert "output is [4, 3] of float32, labels are [4] of int64" in notes


LOSSES = {
    r"test_loss_call\.py:\d+": swapped,
    "loss_fn": functional.cross_entropy,
    r"loss_fn\b": nn.NLLLoss(),
}


@pytest.mark.parametrize("where", LOSSES)
def test_the_error_ends_with_the_loss_function(where: str) -> None:
    example = torch.randn(4, 6), torch.randint(3, (4, 5))

    with pytest.raises(Exception) as error:
        capture(nn.Linear(6, 3), LOSSES[where], example)

    traced = "raised while Piper traced the loss function on tensors without values"
    assert re.fullmatch(f"{where}: {traced}", error.value.__notes__[-1])


def test_an_output_by_names_is_told_by_its_names() -> None:
    class Named(nn.Linear):
        def forward(self, x: Any) -> Any:
            return {"logits": super().forward(x), "hidden": x}

    example = torch.randn(4, 6), torch.randint(3, (4,))

    with pytest.raises(AttributeError) as error:
        capture(Named(6, 3), functional.cross_entropy, example)

    notes = "\n".join(error.value.__notes__)
    assert "fix: the output is a dict with logits, hidden: write output['logits'] in loss" in notes
