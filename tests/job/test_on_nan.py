"""A loss or norm that is not finite: its origin is named, and the step is as `on_nan` says."""

from __future__ import annotations

import pytest
import torch
from overflowing import batches, model, plain, train
from pool import run_on
from torch import nn

import piper
from piper.errors import InputError


def assert_equal(found: dict[str, torch.Tensor] | None, wanted: dict[str, torch.Tensor]) -> None:
    assert found is not None
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("on_nan", ["skip", "report", None])
def test_one_device_goes_on_as_plain_pytorch(on_nan: str | None) -> None:
    state, _, lines = train(0, 1, on_nan)

    assert_equal(state, plain(skip=on_nan == "skip"))
    assert len([line for line in lines if "the loss is nan" in line]) >= (on_nan is not None)


def test_two_devices_skip_the_step_and_name_the_origin() -> None:
    (state, _, lines), (_, _, others) = run_on(2, train, 2, "skip")

    assert_equal(state, plain(skip=True))
    assert lines == others
    assert lines == [
        "step 2: the loss is nan; it began in region PP1, where PP1:F@2 on device 0 makes NaN; "
        "the step is skipped"
    ]


def test_two_devices_stop_with_the_same_error() -> None:
    found = run_on(2, train, 2, "stop")

    assert {error for _, error, _ in found} == {
        "on_nan: step 2: the loss is nan; it began in region PP1, where PP1:F@2 on device 0 makes "
        "NaN\n  fix: look at that region and at the batch; lower the learning rate, or give "
        "max_norm"
    }


def test_what_makes_no_sense_is_an_error() -> None:
    wrong = {"'ignore'": {"on_nan": "ignore"}, "CUDA": {"on_nan": "skip", "graphs": True}}
    wrong["float16"] = {"on_nan": "skip", "precision": "fp16"}
    for what, options in wrong.items():
        with pytest.raises(InputError, match=what):
            piper.Trainer(model(), nn.functional.mse_loss, example=batches()[0], **options)


def spoiled(which: int, row: int, number: float) -> tuple[torch.Tensor, torch.Tensor]:
    batch = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    batch[which][row, 1] = number
    return batch


def test_a_bad_number_in_the_batch_is_named_as_that(caplog: pytest.LogCaptureFixture) -> None:
    strategy = piper.strategies.one_f_one_b(pp=1, microbatches=4)
    trainer = piper.Trainer(
        model(), nn.functional.mse_loss, strategy, example=batches()[0], on_nan="skip"
    )
    nan, infinity = float("nan"), float("inf")

    for which, row, number in ((0, 5, nan), (1, 3, nan), (0, 2, -infinity), (1, 7, infinity)):
        trainer.step(*spoiled(which, row, number))
    trainer.step(*spoiled(0, 0, 1.0))
    trainer.close()

    lines = [line for line in caplog.messages if "it began" in line]
    assert [line.split("; ")[1] for line in lines] == [
        "it began in the tensor x of the batch, row 5, which PP0:F@2 on device 0 reads",
        "it began in the tensor labels of the batch, row 3, which PP3:F@1 on device 0 reads",
        "it began in the tensor x of the batch, which PP0:F@1 on device 0 reads",
        "it began in the tensor labels of the batch, which PP3:F@3 on device 0 reads",
    ]


class Masked(nn.Module):
    """NaN stands for what is missing, and does no harm. A row that is all masked does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            filled = self.layer(x.nan_to_num(0.0))
        with piper.annotate("PP"):
            return torch.softmax(filled + mask, -1)


def test_what_does_no_harm_in_the_batch_is_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    x, mask, y = torch.ones(4, 2), torch.zeros(4, 2), torch.ones(4, 2)
    trainer = piper.Trainer(
        Masked(), nn.functional.mse_loss, example=(x, mask, y), on_nan="skip", whole=[]
    )
    x[1, 0] = float("nan")
    mask[:, 0] = -float("inf")
    _ = trainer.step(x, mask, y)  # nothing is wrong
    mask[3, 1] = -float("inf")

    trainer.step(x, mask, y)

    assert [line.split("; ")[1] for line in caplog.messages if "it began" in line] == [
        "it began in region PP1, where PP1:F on device 0 makes NaN of an infinity in the tensor "
        "mask of the batch"
    ]
