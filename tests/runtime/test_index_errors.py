"""Token ids and labels that are too large: the error says what the batch has."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import piper
from piper import strategies
from piper.errors import RunError

IDS = torch.arange(8).view(4, 2)


@pytest.mark.parametrize(("parts", "first"), [(1, 5), (2, 9)])
@pytest.mark.parametrize("position", [0, 1], ids=["ids", "labels"])
def test_an_index_out_of_range_is_explained(position: int, parts: int, first: int) -> None:
    def loss(output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), given.flatten())

    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    strategy = strategies.one_f_one_b(pp=1, microbatches=parts)
    sgd = partial(torch.optim.SGD, lr=0.1)
    with piper.Trainer(model, loss, strategy, example=(IDS, IDS), optimizer=sgd) as trainer:
        trainer.step(IDS, IDS)
        with pytest.raises(RunError) as found:
            trainer.step(*[IDS + 5 * (k == position) for k in range(2)])

    text = str(found.value)
    assert "IndexError" in text and "fix: token ids and labels count from 0" in text
    assert f"tensor {position} of the batch has integers from {first} to 12 here" in text
