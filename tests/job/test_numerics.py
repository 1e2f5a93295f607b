"""A strategy beside plain PyTorch: right ones agree, and every kind of mistake is seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from draws import one_of
from shared_capture import one_model
from torch import Tensor, nn

from piper import Place, Replicate, Split, annotate, where
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.batch.random_batches import constant_inputs, like
from piper.job.inspection import Inspected, inspecting
from piper.job.loss.loss_reduction import LossReduction
from piper.job.numerics import Comparison, compare
from piper.job.numerics.model import refuse_large
from piper.plan.instructions import Add, Load
from piper.runtime.comm.threads import ThreadComm
from piper.runtime.execute import Program
from piper.runtime.updates import BucketUpdate
from piper.trainer import Trainer

ADAM = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
PIPELINE = [Place(where(PP=0), [0]), Place(where(PP=1), [1]), Split("MB", 2)]
REPLICAS = [
    Place(where(PP=0), [0, 2]),
    Place(where(PP=1), [1, 3]),
    Replicate(where(PP=0), [0, 2], zero=2),
    Replicate(where(PP=1), [1, 3]),
    Split("MB", 2),
]


class Net(nn.Module):
    """Two stages with a tied parameter, a frozen one, and one that nothing uses."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.layers[0].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.dropout(torch.tanh(self.layers[0](self.embedding(tokens))))
        with annotate("PP"):
            return self.norm(self.layers[1](x)) @ self.embedding.weight.T


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


KNOWN = one_model()


def inspected(strategy: Any, model: nn.Module | None = None, **options: Any) -> Inspected:
    plainly = model is None and not {"loss_fn", "loss_weight", "precision"} & set(options)
    with KNOWN() if plainly else nullcontext():
        return inspected_anew(strategy, model, **options)


def inspected_anew(strategy: Any, model: nn.Module | None = None, **options: Any) -> Inspected:
    tokens = torch.arange(32).reshape(4, 8) % 11
    options = {"optimizer": ADAM, "example": (tokens, tokens), **options}
    with inspecting(), pytest.raises(Inspected) as found:
        Trainer(model or Net(), options.pop("loss_fn", loss_fn), strategy, **options)
    return found.value


@cache
def usual() -> Inspected:
    """With replicas; mistakes are made later, when it runs."""
    return inspected(REPLICAS)


def compared(strategy: Any, model: nn.Module | None = None, **options: Any) -> Comparison:
    plainly = strategy is REPLICAS and model is None and not options
    found = usual() if plainly else inspected(strategy, model, **options)
    return compare(found.job, found.example, found.captured, found.compiled, steps=2)


@one_of(2)
@pytest.mark.parametrize(("strategy", "max_norm"), [(PIPELINE, None), (REPLICAS, 0.1)])
def test_a_right_strategy_agrees(strategy: Any, max_norm: float | None) -> None:
    found = compared(strategy, max_norm=max_norm)

    assert found.agrees
    assert (found.dtype, found.coarsest, len(found.steps)) == ("float64", "float64", 2)
    assert {p.name for p in found.parameters} == {
        "embedding.weight", "layers.0.weight", "layers.1.weight", "layers.1.bias", "norm.weight",
        "norm.bias",
    }  # fmt: skip
    assert all(p.difference < 1e-12 for p in found.parameters)


def test_losses_that_are_weighed_agree() -> None:
    labels = torch.arange(32).reshape(4, 8) % 11
    labels[labels == 3] = -100

    def total(output: Tensor, labels: Tensor) -> Tensor:
        logits = output.flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")

    found = compared(
        REPLICAS, loss_fn=total, reduction="sum", example=(labels.clamp(min=0), labels),
        loss_weight=lambda tokens, labels: (labels != -100).sum(),
    )  # fmt: skip

    assert found.agrees


class OwnLoss(nn.Module):
    """A model of floating-point inputs that computes its loss itself."""

    def __init__(self, *layers: nn.Module, kept: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.register_buffer("scale", torch.tensor(0.5) if kept else None)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        scaled = x if self.scale is None else x * self.scale
        return {"loss": nn.functional.mse_loss(scaled.flatten(1), y), "output": x.detach()}


OWN: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "linear": lambda: (OwnLoss(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), (8,)),
    "convolution": lambda: (OwnLoss(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 1)), (1, 4, 2)),
    "norm": lambda: (OwnLoss(nn.LayerNorm(8), nn.Linear(8, 8), kept=True), (8,)),
    "mixed types": lambda: (OwnLoss(nn.Linear(8, 8), Half()), (8,)),
}


class Half(nn.Module):
    """Computes in a type of its own, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16().tanh().to(x.dtype)


@one_of(6)
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("named", [False, True])
def test_models_with_a_loss_of_their_own_agree(kind: str, named: bool) -> None:
    """They are compared in float64, and so is what is found out about their loss."""
    torch.manual_seed(0)
    model, shape = OWN[kind]()
    x, y = torch.randn(4, *shape), torch.randn(4, 8)

    found = compared(
        [Place(where(), [0]), Split("MB", 2)], model, loss_fn=None,
        example={"x": x, "y": y} if named else (x, y),
    )  # fmt: skip

    assert found.agrees
    assert found.dtype == "float64"
    assert found.coarsest == ("bfloat16" if kind == "mixed types" else "float64")


# Mistakes


def skip_an_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of later microbatches are dropped on the last stage."""
    right = Program.add

    def wrong(self: Program, add: Add) -> Any:
        return (lambda: None) if "PP1" in add.into else right(self, add)

    monkeypatch.setattr(Program, "add", wrong)


def weigh_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every replica took the mean of its own microbatches."""
    right = LossReduction.shares
    twice = lambda *given: tuple(2 * w for w in right(*given))  # noqa: E731
    monkeypatch.setattr(LossReduction, "shares", twice)


def one_microbatch_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Program.load

    def wrong(self: Program, load: Load) -> Any:
        first = Load(load.value, load.role, load.index, 0, load.parts)
        return right(self, first if load.role == "batch" else load)

    monkeypatch.setattr(Program, "load", wrong)


def nothing_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas keep their own gradients."""
    from piper.runtime.comm.in_flight import Arrived

    monkeypatch.setattr(ThreadComm, "all_reduce", lambda self, *_: Arrived([], ()))


Mistake = Callable[[pytest.MonkeyPatch], None]


@one_of(2)
@pytest.mark.parametrize(
    ("mistake", "wrong"),
    [
        (skip_an_add, {"layers.1.weight", "layers.1.bias", "norm.weight", "norm.bias"}),
        (nothing_is_reduced, {"layers.1.weight", "layers.1.bias", "norm.weight", "norm.bias"}),
        (weigh_twice, None),
        (one_microbatch_for_all, None),
    ],
)
def test_a_mistake_is_seen_and_its_parameters_named(
    mistake: Mistake, wrong: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)

    found = compared(REPLICAS)

    assert not found.agrees
    assert wrong is None or wrong <= {p.name for p in found.wrong}
    assert found.parameters[0].difference == max(p.difference for p in found.parameters)


def test_a_small_mistake_in_one_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One millionth too much, in one bucket: Adam would hide it, its gradient does not."""
    right = BucketUpdate.gradients

    def wrong(self: BucketUpdate) -> Any:
        found = right(self)
        for tensor in found or () if self.update.bucket == "PP0" else ():
            tensor.mul_(1 + 1e-6)
        return found

    monkeypatch.setattr(BucketUpdate, "gradients", wrong)

    found = compared(PIPELINE)

    assert [p.name for p in found.wrong] == ["layers.0.weight"]
    assert 5e-7 < found.wrong[0].gradient < 2e-6


# What it runs on


def test_dropout_is_switched_off_and_said_so() -> None:
    found = compared(PIPELINE, Net(dropout=0.5))

    assert found.agrees
    assert found.notes == ("dropout is off (p = 0): Piper's masks are not those of eager PyTorch",)


class Masked(Net):
    """With buffers of all kinds of types, as models of transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("counts", torch.tensor([3, -4], dtype=torch.int8))
        self.register_buffer("phase", torch.tensor([1j, 2.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        scale = self.mask.sum() + self.counts.sum() + self.phase.abs().sum().detach()
        return super().forward(tokens) * scale.to(torch.float32)


def test_buffers_of_any_type_are_compared() -> None:
    found = compared(PIPELINE, Masked())

    assert found.agrees


class Functional(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(tokens), 0.5, self.training)


@pytest.mark.soak
def test_dropout_that_is_no_module_is_switched_off_by_eval_mode() -> None:
    found = compared(PIPELINE, Functional())

    assert found.agrees
    assert found.notes[0].startswith("dropout is off (eval mode)")


class OnlyFloat(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        assert self.norm.weight.dtype == torch.float32, "floats only"
        return super().forward(tokens)


def test_a_model_that_does_not_run_in_float64_is_compared_in_its_own_type() -> None:
    found = compared(PIPELINE, OnlyFloat())

    assert found.agrees
    assert (found.dtype, found.coarsest) == ("float32", "float32")
    assert found.notes == (
        "not in float64, in which the model does not run: AssertionError floats only",
    )


class Casting(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


def test_a_model_that_computes_in_float32_is_held_to_its_digits() -> None:
    found = compared(PIPELINE, Casting())

    assert found.agrees
    assert (found.dtype, found.coarsest) == ("float64", "float32")
    assert found.tolerance == pytest.approx(3.45e-4, rel=1e-2)
    (note,) = found.notes
    assert "digits of float32" in note and "test_numerics.py:" in note


def test_a_model_on_meta_starts_from_its_first_values() -> None:
    with torch.device("meta"):
        model = Net()

    assert compared(PIPELINE, model, seed=3).agrees


def test_a_model_that_is_too_large_is_refused() -> None:
    found = inspected(PIPELINE)

    with pytest.raises(InputError) as refused:
        refuse_large(found.compiled, free=1000)

    assert "half of the free memory is 0.0 GiB\n  fix: make the model smaller" in str(refused.value)


def test_data_are_like_the_example() -> None:
    tokens, labels = torch.tensor([[3, 9], [4, 5]]), torch.tensor([[-100, 2], [7, 2]])
    mask, scale, flat = torch.tensor([[True], [False]]), torch.tensor(2.0), torch.zeros(2, 50)

    example = Batch.of((tokens, labels, mask, scale, flat, 7))

    drawn = like(example, 6, torch.Generator().manual_seed(0)).arguments

    assert [x.shape for x in drawn[:5]] == [(6, 2), (6, 2), (6, 1), (), (6, 50)]
    assert drawn[0].min() >= 3 and drawn[0].max() <= 9
    assert set(drawn[1].flatten().tolist()) == {-100, 2, 7}
    assert drawn[2].dtype == torch.bool and drawn[3] == 2.0 and drawn[5] == 7
    assert 0.8 < drawn[4].std() < 1.2


def test_an_example_of_zeros_is_pointed_out() -> None:
    zeros = Batch.of((torch.arange(4), torch.zeros(4, dtype=torch.int64)))

    names = ["ids", "mask"]
    assert "in the example, mask has one value everywhere" in constant_inputs(zeros, names)[0]
    assert constant_inputs(Batch.of((torch.arange(4), torch.zeros(4))), names) == []


@pytest.mark.soak
def test_mixed_precision_is_left_out() -> None:
    """It is not part of the strategy, and would hide mistakes of the strategy behind rounding."""
    found = compared(PIPELINE, precision="bf16")

    assert found.agrees
    assert found.coarsest == "float64"
    assert found.notes == ("without mixed precision: precision=... of the script is not used here",)
