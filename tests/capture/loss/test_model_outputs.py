"""Outputs of a model without rows: a mean over rows is used as one, a sum never is by mistake."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from draws import every
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, annotate, where
from piper.capture.loss import (
    GrowingOutput,
    LossForm,
    form_from_json,
    form_to_json,
    function_form,
    growing_outputs,
    model_form,
)
from piper.capture.trace.arguments.outputs import Output
from piper.capture.trace.forward import trace
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.inspection import Inspected, inspecting
from piper.job.loss.loss_reduction import reduction_of
from piper.job.numerics import compare

ROWS, PARTS, WIDTH = 4, 3, 6
Aux = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Any, Tensor], Tensor]

SUMS: dict[str, Aux] = {
    "squares": lambda x, h: (h**2).sum(),
    "scaled": lambda x, h: 0.5 * h.square().sum() / 7,
    "over as many as there are rows": lambda x, h: h.square().sum() / ROWS,
    "sizes": lambda x, h: h.abs().sum(),
    "a vector": lambda x, h: h.square().sum(0),
    "means of features": lambda x, h: h.square().mean(1).sum(),
    "added": lambda x, h: h.square().sum() - x.abs().sum(),
    "a count": lambda x, h: (h > 0).sum(),
    "one element": lambda x, h: h.square().sum()[None],
    "rows, then features": lambda x, h: h.sum(0).mean(),
    "other numbers": lambda x, h: (h.to(torch.complex128) ** 2).real.sum(),
    "errors": lambda x, h: F.mse_loss(h, x, reduction="sum"),
    "letters": lambda x, h: torch.einsum("bi,bi->", h, h),
    "dot": lambda x, h: h.flatten() @ x.flatten(),
    "x.T @ x": lambda x, h: (h.T @ x).mean(),
    "a mean times rows": lambda x, h: h.square().mean() * len(h),
}
GROWING: dict[str, Aux] = {  # neither a sum nor a mean
    "norm": lambda x, h: h.norm(),
    "a root": lambda x, h: h.square().sum().sqrt(),
    "linalg": lambda x, h: torch.linalg.norm(h),
    "sum of norms": lambda x, h: h.norm(dim=0).sum(),
    "square": lambda x, h: h.sum() ** 2,
    "sum and mean": lambda x, h: h.square().sum() + x.mean(),
    "sum times mean": lambda x, h: h.square().sum() * h.square().mean(),
    "limited": lambda x, h: h.square().sum().clamp(max=1e9),
    "logarithm": lambda x, h: h.square().sum().log(),
    "diagonal": lambda x, h: (h.T @ h).diagonal().sum(),
}
MEANS: dict[str, Aux] = {
    "mean": lambda x, h: h.square().mean(),
    "scaled": lambda x, h: 3 * h.mean() + 2,
    "over rows": lambda x, h: h.square().sum() / h.shape[0],
    "times": lambda x, h: h.square().sum() * (1 / len(h)),
    "of means": lambda x, h: h.mean(1).mean(),
    "of norms": lambda x, h: h.norm(dim=1).mean(),
    "errors": F.mse_loss,
    "letters": lambda x, h: torch.einsum("bi,bi->b", h, h).mean(),
    "a constant": lambda x, h: torch.ones(()),
}
ORDINARY: dict[str, Aux] = {  # of a microbatch, as in a loop that accumulates gradients
    "product of means": lambda x, h: (h.softmax(1).mean(0) * h.mean(0)).sum(),
    "root mean square": lambda x, h: h.square().mean().sqrt(),
    "norm over rows": lambda x, h: h.square().sum().sqrt() / len(h) ** 0.5,
    "logarithm of a mean": lambda x, h: h.exp().mean().log(),
    "variance": lambda x, h: h.var(0).mean(),
}


LARGEST: dict[str, Aux] = {  # over rows, one for each feature
    "largest": lambda x, h: h.amax(0),
    "norms": lambda x, h: h.norm(dim=0),
    "spread": lambda x, h: h.std(0),
    "soft": lambda x, h: h.logsumexp(0),
    "product": lambda x, h: h.prod(0),
    "median": lambda x, h: h.median(0).values,
}


class Net(nn.Module):
    def __init__(self, aux: Aux) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.aux = aux

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.layers[0](x))
        return self.layers[1](hidden), self.aux(x, hidden)


def mean(output: Any, y: Tensor) -> Tensor:
    return F.mse_loss(output[0], y) + 0.01 * output[1].sum()


def total(output: Any, y: Tensor) -> Tensor:
    return F.mse_loss(output[0], y, reduction="sum") + 0.01 * output[1].sum()


def divided(output: Any, y: Tensor) -> Tensor:
    return F.mse_loss(output[0], y) + 0.01 * output[1].sum() / len(y)


def without(output: Any, y: Tensor) -> Tensor:
    return F.mse_loss(output[0], y)


def data(parts: int = PARTS) -> Batch:
    generator = torch.Generator().manual_seed(1)
    size = (2, ROWS * parts, WIDTH)
    x, y = torch.randn(size, generator=generator, dtype=torch.float64)
    return Batch.of((x, y))


@cache
def outputs_of(aux: Aux) -> tuple[Output, tuple[GrowingOutput, ...]]:
    """What the model returns, and which of it grows."""
    model, example = Net(aux), data().part(0, PARTS).arguments
    leaves, spec = pytree.tree_flatten(model(example[0]))
    output = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves], spec
    return output, growing_outputs(model, output, example, frozenset(), "cpu", None)


def form_of(aux: Aux, loss: Loss) -> LossForm:
    (output, growing), example = outputs_of(aux), data().part(0, PARTS).arguments
    return function_form(loss, output, example, LossForm(), frozenset(), growing)


def difference(aux: Aux, loss: Loss) -> float:
    """The loss of the batch, against that of its microbatches with their shares."""
    model, form = Net(aux), form_from_json(form_to_json(form_of(aux, loss)))
    reduction, batch = reduction_of(None, False, None, PARTS, form), data()
    own = reduction.weights(batch, PARTS)
    shares = reduction.shares(own, sum(own))

    def of(one: Batch) -> float:
        x, y = one.arguments
        return float(loss(model(x), y).detach())

    found = sum(of(one) * s for one, s in zip(batch.parts(PARTS), shares, strict=True))
    return abs(found - of(batch)) / abs(of(batch))


def cases(kind: dict[str, Aux], nth: int) -> list[Any]:
    return every(nth, kind.values(), kind)


@pytest.mark.parametrize("aux", cases(SUMS, 9))
def test_a_sum_is_right_in_a_sum_and_no_part_of_a_mean(aux: Aux) -> None:
    with pytest.raises(InputError, match=r"(?s)test_model_outputs.py:\d+.*aux / x.shape\[0\]"):
        difference(aux, mean)
    for loss in (total, divided, without):
        assert difference(aux, loss) < 1e-12


@pytest.mark.parametrize("aux", cases(GROWING, 6))
def test_a_norm_is_not_supported_where_the_loss_uses_it(aux: Aux) -> None:
    for loss in (mean, total, divided):
        with pytest.raises(InputError, match="a sum or a norm over the rows"):
            difference(aux, loss)
    assert difference(aux, without) < 1e-12


def test_a_norm_that_is_a_sum_is_one() -> None:
    def sizes(x: Tensor, h: Tensor) -> Tensor:
        return h.norm(p=1)

    with pytest.raises(InputError, match="a sum or a norm over the rows"):
        difference(sizes, mean)
    for loss in (total, divided, without):
        assert difference(sizes, loss) < 1e-12


@pytest.mark.parametrize("aux", cases(MEANS, 5))
def test_a_mean_is_one(aux: Aux) -> None:
    assert not form_of(aux, mean).unknown
    assert difference(aux, mean) < 1e-12


@pytest.mark.parametrize("aux", cases(ORDINARY, 5))
def test_what_only_a_microbatch_can_estimate_is_accepted_and_known(aux: Aux) -> None:
    (where,) = form_of(aux, mean).unknown

    assert form_of(aux, mean).kind == "mean"
    assert where == f"test_model_outputs.py:{aux.__code__.co_firstlineno}"


def test_a_loop_over_rows_shows_no_mean() -> None:
    form = form_of(lambda x, h: sum(row.sum() for row in h), mean)

    assert form == form_from_json(form_to_json(form)) == LossForm("mean", unknown=("",))


class OwnLoss(Net):
    """Of as many features as rows, so that sizes show nothing."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.layers[0](x))
        aux = self.aux(x[:, :ROWS], hidden[:, :ROWS])
        return F.mse_loss(self.layers[1](hidden), y) + aux.double().mean()


@pytest.mark.parametrize("aux", cases(SUMS | GROWING | MEANS | LARGEST, 12))
def test_a_models_own_loss_is_right_or_not_proved(aux: Aux) -> None:
    model, batch = OwnLoss(aux), data()
    traced = trace(model, None, batch.part(0, PARTS).arguments, "cpu")
    form = model_form(traced, own=True)

    losses = [float(model(*one.arguments).detach()) for one in (batch, *batch.parts(PARTS))]

    assert form.kind in ("mean", None)
    assert form.kind is None or losses[0] == pytest.approx(sum(losses[1:]) / PARTS, rel=1e-12)


def test_a_weight_or_one_microbatch_needs_no_mean() -> None:
    form = form_of(SUMS["squares"], mean)

    assert reduction_of(None, False, lambda *one: 1, PARTS, form).kind == "mean"
    assert reduction_of(None, False, None, 1, form).kind == "mean"
    with pytest.raises(InputError):
        reduction_of("mean", False, None, PARTS, form)


# Whole jobs


class Stages(Net):
    """Each of two stages has its part of the second output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        aux = []
        for layer in self.layers:
            with annotate("PP"):
                x = torch.tanh(layer(x))
                aux.append(self.aux(x, x))
        return x, aux[0] + aux[1]


def inspected(aux: Aux, loss: Loss) -> Inspected:
    strategy = [Place(where(PP=0), [0]), Place(where(PP=1), [1]), Split("MB", 2)]
    given = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "example": data(2).arguments}
    with inspecting(), pytest.raises(Inspected) as found:
        Trainer(Stages(aux), loss, strategy, device="cpu", **given)
    return found.value


@pytest.mark.parametrize(("aux", "loss"), [(MEANS["mean"], mean), (SUMS["squares"], total)])
def test_sums_and_means_of_two_stages_agree_with_plain_training(aux: Aux, loss: Loss) -> None:
    found = inspected(aux, loss)

    seen = compare(found.job, found.example, found.captured, found.compiled, steps=2)

    assert seen.agrees
    assert max(step.difference for step in seen.steps) < 1e-12


def test_sums_of_two_stages_are_no_part_of_a_mean() -> None:
    with pytest.raises(InputError, match="the model returns a sum"), inspecting():
        Trainer(
            Stages(SUMS["squares"]), mean, [Place(where(), [0]), Split("MB", 2)],
            example=data(2).arguments, device="cpu",
        )  # fmt: skip
