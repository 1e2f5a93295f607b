"""Token ids and labels that are too large: the error says what the batch has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import nn

import piper
from piper import strategies
from piper.errors import RunError

IDS = torch.arange(8).view(4, 2)


@one_of(2)
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
    name, size = ("input", "labels")[position], [4 // parts, 2]
    assert f"{name} {size} has integers from {first} to 12 here" in text


class Positions(nn.Module):
    """A language model with learned positions, which begin at `offset`."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.tokens, self.places, self.offset = nn.Embedding(10, 4), nn.Embedding(6, 4), offset
        self.head = nn.Linear(4, 10)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(input_ids.shape[1]) + self.offset)
        logits = self.head(self.tokens(input_ids) + places)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("offset", "most"), [(0, 6), (2, 4)])
def test_rows_that_are_longer_than_the_positions_are_explained(offset: int, most: int) -> None:
    ids = torch.ones(4, 8, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    with (
        piper.Trainer(Positions(offset), None, example=batch, device="cpu") as trainer,
        pytest.raises(RunError) as found,
    ):
        trainer.step(batch)

    assert str(found.value).partition("\n")[2] == (
        "  IndexError: index out of range in self\n"
        f"  an embedding of 6 rows was asked for rows {offset} to {7 + offset}, one for each of "
        "the 8 positions of a row; input_ids [4, 8] has integers from 1 to 1 here; "
        "labels [4, 8] has integers from 1 to 1 here\n"
        f"  fix: truncate the rows in the tokenizer, here to {most} tokens, or make the model with "
        "more positions (n_positions, max_position_embeddings)"
    )


def test_ids_outside_the_vocabulary_are_named_by_their_key() -> None:
    ids = torch.arange(16).view(4, 4)
    batch = {"input_ids": ids, "labels": ids % 10}
    with (
        piper.Trainer(Positions(0), None, example=batch, device="cpu") as trainer,
        pytest.raises(RunError) as found,
    ):
        trainer.step(batch)

    text = str(found.value)
    assert "an embedding of 10 rows was asked for rows 0 to 15; input_ids [4, 4] has" in text
    assert "fix: token ids and labels count from 0, and must be less than the rows" in text


Pick = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def wide(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, None].expand(-1, 4)


PICKS: dict[str, Pick] = {
    "index": lambda x, rows: x[rows],
    "select": lambda x, rows: x.index_select(0, rows),
    "gather": lambda x, rows: x.gather(0, wide(rows)),
    "scatter": lambda x, rows: torch.zeros_like(x).scatter(0, wide(rows), x),
    "scatter_add": lambda x, rows: torch.zeros_like(x).scatter_add(0, wide(rows), x),
    "index_add": lambda x, rows: torch.zeros_like(x).index_add(0, rows, x),
    "index_copy": lambda x, rows: torch.zeros_like(x).index_copy(0, rows, x),
}


class Picking(nn.Module):
    def __init__(self, pick: Pick) -> None:
        super().__init__()
        self.layer, self.pick = nn.Linear(4, 4), pick

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.pick(x, rows)


@one_of(2)
@pytest.mark.parametrize("name", PICKS)
def test_rows_that_another_microbatch_has_are_explained(name: str) -> None:
    """Those of the first batch were in it."""
    x, zeros = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
    gpipe = strategies.gpipe(pp=1, microbatches=2)
    model = Picking(PICKS[name])
    with (
        piper.Trainer(model, nn.functional.mse_loss, gpipe, example=(x, zeros, x)) as trainer,
        pytest.raises(piper.errors.PiperError, match="fix: ") as found,
    ):
        trainer.step(x, zeros, x)
        trainer.step(x, torch.arange(6), x)
    assert "microbatch" in str(found.value)


@pytest.mark.parametrize("first", [torch.int32, torch.int64], ids=str)
def test_labels_of_another_type_are_explained(first: torch.dtype) -> None:
    x, y = torch.randn(6, 4), torch.randint(4, (6,))
    loss = nn.functional.cross_entropy
    with (
        piper.Trainer(nn.Linear(4, 4), loss, example=(x, y.to(first)), device="cpu") as trainer,
        pytest.raises(
            RunError, match=r"labels is torch.int32 here\n  fix: give class labels as int64"
        ),
    ):
        trainer.step(x, y.int())
