"""A precision that is misspelt, or does not fit the model, is explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper import Precision, Trainer
from piper.capture.precision import precision_of
from piper.errors import InputError

X = torch.zeros(2, 4)
BF16 = 'write precision="bf16" or "fp16", or piper.Precision(compute="bfloat16")'
PLAIN = BF16 + ", or leave precision= out to compute in the type of the model"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)))


def trainer(precision: Any) -> Trainer:
    loss = nn.functional.mse_loss
    return Trainer(Tied(), loss, example=(X, X), precision=precision, device="cpu")


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        ("b16", "'b16' is not a precision", PLAIN),
        (16, "16 is not a precision", PLAIN),
    ],
)
def test_what_is_not_a_precision(given: Any, what: str, fix: str) -> None:
    with pytest.raises(InputError) as error:
        trainer(given)

    assert str(error.value) == f"precision: {what}\n  fix: {fix}"


@pytest.mark.parametrize(
    ("fields", "what", "fix"),
    [
        (
            {"compute": "bflot16"},
            "compute='bflot16' is not a type that Piper can train in",
            'write compute="bfloat16"',
        ),
        (
            {"reduce": "int8"},
            "reduce='int8' is not a type that Piper can train in",
            "use one of bfloat16, float16, float32, float64",
        ),
        (
            {"compute": "float32", "master": "bfloat16"},
            "masters in bfloat16 are coarser than the parameters in float32",
            'write Precision(compute="bfloat16", master="float32")',
        ),
        (
            {"compute": "fp16", "master": "fp16"},
            "masters in float16 would lose small updates",
            'write master="float32"',
        ),
        (
            {"keep": [3]},
            "keep has 3, which is neither a path nor a class of modules",
            'write keep=["layers.*.norm", torch.nn.LayerNorm]',
        ),
    ],
)
def test_what_is_not_a_type(fields: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(InputError) as error:
        Precision(**fields)

    assert str(error.value) == f"precision: {what}\n  fix: {fix}"


@pytest.mark.parametrize(
    ("keep", "what", "fix"),
    [
        (["nrom"], "keep: the model has no module nrom", "use one of norm"),
        ([nn.RMSNorm], "keep: the model has no module RMSNorm", "use one of LayerNorm"),
        (
            ["head"],
            "keep: embed.weight is also a parameter of a module that is kept",
            "add 'embed' to keep, or keep neither",
        ),
    ],
)
def test_what_does_not_fit_the_model(keep: list[Any], what: str, fix: str) -> None:
    with pytest.raises(InputError) as error:
        trainer(Precision(keep=keep))

    assert str(error.value) == f"precision: {what}\n  fix: {fix}"


def test_types_may_be_written_as_in_torch() -> None:
    wanted = Precision(compute="bfloat16", master="float32", keep=("norm",))

    assert Precision(compute=torch.bfloat16, master="fp32", keep="norm") == wanted  # type: ignore[arg-type]
    assert precision_of("bf16") == Precision()
    assert precision_of(None) is None


def test_modules_are_kept_by_path_and_by_class() -> None:
    for keep in ("no*", nn.LayerNorm):
        one = trainer(Precision(keep=(keep,)))

        types = {name: dtype for part in one._programs.assigned.values()
                 for rows in part.part.contents.values() for name, _, dtype in rows}  # fmt: skip
        assert types["norm.weight"] == "float32"
        assert types["embed.weight"] == "bfloat16"
        one.close()
