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
