"""What a step is given is one value: it goes in and out as it is, and is cut by rows."""

from __future__ import annotations

import pytest
import torch

from piper.job.batch import Batch

X, Y = torch.arange(12).reshape(4, 3), torch.randn(4)
SCALE = torch.tensor(2.0)


def test_a_model_gets_the_arguments_that_step_was_given() -> None:
    given = ({"x": X, "scale": SCALE}, [7, "text"], Y)

    ((inputs, more, y)) = Batch.of(given).arguments

    assert inputs["x"] is X and inputs["scale"] is SCALE and more == [7, "text"] and y is Y


def test_a_part_has_its_rows_and_all_that_has_none() -> None:
    batch = Batch.of((X, SCALE, 7, Y))

    x, scale, number, y = batch.part(1, 2).arguments

    assert torch.equal(x, X[2:]) and torch.equal(y, Y[2:])
    assert scale is SCALE and number == 7
    assert [part.tensors[0].tolist() for part in batch.parts(4)] == [[row] for row in X.tolist()]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ((X + 1, Y, 7), True),
        ((X.float(), Y, 7), False),
        ((X[:2], Y[:2], 7), False),
        ((X, Y, 8), False),
        ((X, [Y, 7]), False),
    ],
)
def test_programs_are_for_shapes_types_numbers_and_nesting(
    other: tuple[object, ...], same: bool
) -> None:
    assert (Batch.of((X, Y, 7)).shapes == Batch.of(other).shapes) is same


@pytest.mark.parametrize(
    ("given", "tokens"), [((X, Y), 12), ((Y, X), 12), ((Y, Y), 4), ((SCALE, Y), 4), ((SCALE,), 1)]
)
def test_tokens_are_whole_numbers_or_else_rows(given: tuple[object, ...], tokens: int) -> None:
    assert Batch.of(given).tokens == tokens


def test_a_batch_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Batch.of((X,)).leaves = ()  # type: ignore[misc]
