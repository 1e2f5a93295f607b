"""Products in float8: every strategy trains as a plain loop that rounds by hand."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from draws import levels_of
from mixed_precision import ADAMW, STEPS, ByHand, by_hand, squares
from runtime.test_precision import assert_close
from runtime.test_replicate import LEVELS, legal, stages_of
from shared_capture import using
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from piper import (
    Place,
    Precision,
    Remat,
    Split,
    Strategy,
    annotate,
    rehearse,
    where,
)
from piper.capture import Captured, capture
from piper.capture.kernels.scaled_linear import SCALED_LINEAR, elsewhere, on_gpu, rounded
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.rehearsal import rehearsed
from piper.strategies import BUILDERS, one_f_one_b

ONE = Strategy([Place(where(), [0]), Split("MB", 4)])
FP8 = Precision(fp8=["*.mlp"])
FINE = Precision(fp8=["*.mlp"], master="float64", reduce="float64", output="float64")
WIDTH, TOKENS = 16, 4


class ByHandProduct(torch.autograd.Function):
    """A scale for each row, e4m3 for values, e5m2 for gradients; weights' gradients in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return by_rows(x, torch.float8_e4m3fn, 448.0, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return by_rows(grad, torch.float8_e5m2, 57344.0, weight.T), of_weight


def by_rows(x: Tensor, kind: torch.dtype, top: float, weight: Tensor) -> Tensor:
    rows = x.flatten(0, -2).float()
    a, b = (
        (t.abs().max(dim=1).values / m)[:, None] for t, m in ((rows, top), (weight.float(), 448))
    )
    left, right = (rows / a).to(kind), (weight.float() / b).to(torch.float8_e4m3fn)
    found = left.float() @ right.float().T * a * b.T
    return found.bfloat16().unflatten(0, x.shape[:-1])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.plain = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x + self.mlp(self.norm(x)))


class LayerByHand(Layer):
    def forward(self, x: Tensor) -> Tensor:
        first, last = self.mlp[0], self.mlp[2]
        inner = functional.gelu(ByHandProduct.apply(self.norm(x), first.weight) + first.bias)
        return self.plain(x + ByHandProduct.apply(inner, last.weight))


class Layers(nn.Module):
    def __init__(self, stages: int, kind: type[Layer] = Layer) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(kind() for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = layer(x)
        return x


def batches(rows: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [tuple(torch.randn(2, rows, TOKENS, WIDTH, generator=draw)) for _ in range(STEPS)]  # type: ignore[misc]


@cache
def captured(stages: int, precision: Precision) -> tuple[nn.Module, Captured]:
    model, (x, y) = Layers(stages), batches(1)[0]
    return model, capture(model, squares, (x.bfloat16(), y), "cpu", (), precision)


@cache
def reference(stages: int, precision: Precision, parts: int) -> ByHand:
    return by_hand(
        Layers(stages, LayerByHand), squares, [precision] * STEPS, batches(parts), parts, 0.5
    )


def trained(strategy: Strategy, precision: Precision, stages: int, parts: int) -> Any:
    model, known = captured(stages, precision)
    with using(known):
        return rehearse(
            model, squares, strategy, batches(parts), optimizer=ADAMW, precision=precision,
            max_norm=0.5,
        )  # fmt: skip


def test_one_device_is_bitwise_the_loop() -> None:
    found = trained(ONE, FP8, 2, 4)

    wanted = reference(2, FP8, 4)
    assert [dict(parts) for parts in found.parts] == wanted.losses
    for name, master in wanted.masters.items():
        assert torch.equal(found.parameters[name], master), name


@pytest.mark.soak
@pytest.mark.parametrize(("schedule", "zero"), levels_of(BUILDERS, LEVELS, nth=8, first=5))
def test_every_schedule_with_every_level(schedule: str, zero: int) -> None:
    replicas = 1 if schedule == "dualpipe" else 2
    strategy = legal(schedule, 2, dp=replicas, zero=zero)
    strategy = strategy + Remat(where()) if zero % 2 else strategy
    stages, parts = max(stages_of(strategy), 2), 2 * strategy.microbatches  # two feeds

    found = trained(strategy, FINE, stages, parts)

    assert_close(found, reference(stages, FINE, parts), 1e-6)


@pytest.mark.soak
@pytest.mark.parametrize(("divided", "tolerance"), [({"cp": 2}, 1e-12), ({"tp": 2}, 1e-2)])
def test_divided_tokens_and_weights(divided: dict[str, int], tolerance: float) -> None:
    """Scales are those of whole rows, so the first losses are equal if only tokens are divided.
    Else sums of bfloat16 differ. The trials of rules compare them in float64."""
    strategy = one_f_one_b(pp=1, microbatches=2, dp=2, zero=3, **divided)
    options = Options(optimizer=ADAMW, precision=FINE, max_norm=0.5)

    found = rehearsed(Job(Layers(2), squares, strategy, options), [Batch.of(b) for b in batches(4)])

    wanted = reference(2, FINE, 4).losses
    assert dict(found.parts[0]) == pytest.approx(wanted[0], rel=tolerance)
    assert dict(found.parts[-1]) == pytest.approx(wanted[-1], rel=1e-2)


@pytest.mark.soak
def test_compiled_kernels() -> None:
    """They round less often than others do."""
    found = rehearse(
        Layers(2), squares, ONE, batches(4), optimizer=ADAMW, precision=FP8, max_norm=0.5,
        compiled=True,
    )  # fmt: skip

    for parts, losses in zip(found.parts, reference(2, FP8, 4).losses, strict=True):
        assert dict(parts) == pytest.approx(losses, rel=1e-2)


def test_a_product_is_that_of_the_rounded_factors() -> None:
    """Rows of very different sizes, and one of zeros, against float64."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, WIDTH, generator=draw) * torch.logspace(-20, 20, 6)[:, None]
    x[2], weight = 0.0, torch.randn(32, WIDTH, generator=draw)
    x, weight = x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()

    found = SCALED_LINEAR(x, weight)
    grad = torch.randn(6, 32, generator=draw).bfloat16()
    found.backward(grad)

    near = near_to(x @ weight.T, 2**-3)
    assert near(found) and not torch.equal(found, x @ weight.T)
    assert near_to(grad @ weight, 2**-2)(x.grad)
    assert torch.equal(weight.grad, grad.T @ x)
    assert not found[2].any()


def test_scales_are_quotients_on_every_device() -> None:
    """torch multiplies by the inverse of a number on a GPU, which may round another way."""
    traced = make_fx(rounded, tracing_mode="fake")(torch.randn(3, 16), torch.float8_e5m2)
    divided = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)

    assert len(divided) == 2
    for one in divided:
        assert all(factor.meta["val"].dim() for factor in one.all_input_nodes)
        assert len(one.all_input_nodes) == 2


def test_the_kernel_of_a_gpu_multiplies_the_same() -> None:
    """Here on a CPU, which has it from torch 2.13 on."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, WIDTH, generator=draw), torch.randn(32, WIDTH, generator=draw)
    factors = (*rounded(x, torch.float8_e5m2), *rounded(weight, torch.float8_e4m3fn))
    try:
        found = on_gpu(*factors, fast=False)
    except RuntimeError as error:
        pytest.skip(str(error).partition("\n")[0])

    torch.testing.assert_close(found, elsewhere(*factors).bfloat16(), rtol=2**-8, atol=0)


def near_to(wanted: Tensor, tolerance: float) -> Any:
    """Row by row: a float8 has 3 or 2 digits after the point."""
    rows = wanted.detach().double()
    return lambda found: bool(
        ((found.detach().double() - rows).norm(dim=1) <= tolerance * rows.norm(dim=1)).all()
    )


REFUSED = {
    "the model has no module": {"fp8": ["layers.*.mpl"]},
    "there is no torch.nn.Linear in layers.0.norm": {"fp8": ["*.norm"]},
    "layers.0.mlp.0 is in both keep and fp8": {"fp8": ["*.mlp"], "keep": ["layers.0"]},
    "fp8 with compute='float16'": {"fp8": ["*.mlp"], "compute": "float16"},
    "fp8 has 3, which is neither a path nor a class": {"fp8": 3},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_multiply_in_float8_is_an_error(what: str) -> None:
    x, y = batches(1)[0]
    with pytest.raises(InputError, match=re.escape(what)):
        capture(Layers(1), squares, (x.bfloat16(), y), "cpu", (), Precision(**REFUSED[what]))


def test_sizes_that_a_gpu_cannot_multiply_are_an_error() -> None:
    x = torch.zeros(1, 20).bfloat16()
    with pytest.raises(InputError) as error:
        capture(nn.Linear(20, 16), squares, (x, x[:, :16]), "cpu", (), Precision(fp8=nn.Linear))

    assert "is 16 x 20, and products in float8 want multiples of 16" in str(error.value)
