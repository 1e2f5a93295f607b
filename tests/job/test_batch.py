"""What a step is given is one value: it goes in and out as it is, and is cut by rows."""

from __future__ import annotations

import pytest
import torch

from piper.job.batch.batch import Batch
from piper.job.compile.pricing import predict, price
from piper.job.job import Job
from piper.strategies import one_f_one_b

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


IMAGES, PIXELS = torch.zeros(4, 3, 2, 2), torch.zeros(4, 6, dtype=torch.uint8)
KINDS, MASK = torch.zeros(4, dtype=torch.int64), torch.ones(4, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ((X, Y), 12), (({"mask": MASK, "input_ids": X, "labels": X},), 12), ((X.int(), X), 12),
        ((Y, X), None), ((IMAGES, KINDS), None), ((KINDS, Y), None), ((PIXELS, X), None),
        ((SCALE, Y), None), ((MASK,), None), ((SCALE,), None),
    ],
)  # fmt: skip
def test_only_token_ids_are_tokens(given: tuple[object, ...], tokens: int | None) -> None:
    assert Batch.of(given).tokens == tokens


@pytest.mark.parametrize("shape", [(8, 3), (8,)])
def test_a_forecast_counts_what_the_metrics_count(shape: tuple[int, ...]) -> None:
    ids = torch.ones(shape, dtype=torch.int64)
    model, batch = torch.nn.Embedding(5, 4), Batch.of((ids, torch.ones(*shape, 4)))
    strategy = one_f_one_b(pp=1, microbatches=2, dp=2)
    job = Job(model, torch.nn.functional.mse_loss, strategy)

    _, compiled = job.compile(batch)

    found = predict(compiled, price(compiled))
    assert (found.samples, found.tokens) == job.rows.sizes(batch, 0)
    assert found.unit == ("tokens" if len(shape) == 2 else "samples")


def test_a_batch_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Batch.of((X,)).leaves = ()  # type: ignore[misc]
