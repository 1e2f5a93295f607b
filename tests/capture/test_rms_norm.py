"""RMS norm is one operator in forecasts for a GPU, with the numbers of plain PyTorch."""

from __future__ import annotations

import random

import pytest
import torch
from draws import drawn, draws
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import capture
from piper.capture.kernels.rms_norm import RMS_NORM, has_kernel
from piper.capture.trace.gpu_kernels import as_on_gpu
from piper.names import B, F

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def case(seed: int) -> tuple[Tensor, list[int], Tensor | None, float | None]:
    """Any number of dimensions, with or without a weight, in any type."""
    random.seed(seed)
    torch.manual_seed(seed)
    dtype = TYPES[seed % len(TYPES)]
    shape = [random.randint(1, 5) for _ in range(random.randint(1, 4))]
    inner = shape[-random.randint(1, len(shape)) :]
    weight = torch.randn(inner).to(dtype) if random.random() < 0.7 else None
    return torch.randn(shape).to(dtype), inner, weight, random.choice([None, 1e-6, 0.1])


@drawn
def test_every_norm_and_its_gradients_are_those_of_autograd_bit_by_bit() -> None:
    for seed in range(draws(60, 2000)):
        x, shape, weight, eps = case(seed)
        given = [one.requires_grad_() for one in (x, weight) if one is not None]

        found = RMS_NORM(x, shape, weight, eps)
        wanted = functional.rms_norm(x, shape, weight, eps)

        grad = torch.randn(x.shape).to(x.dtype)
        assert torch.equal(found, wanted), seed
        pairs = zip(torch.autograd.grad(found, given, grad),
                    torch.autograd.grad(wanted, given, grad), strict=True)  # fmt: skip
        assert all(torch.equal(one, other) for one, other in pairs), seed


class Norms(nn.Module):
    def __init__(self, kind: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64, dtype=torch.bfloat16), nn.RMSNorm(64, dtype=kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).float().square()


def test_a_forecast_counts_one_kernel_that_keeps_little() -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16)

    with as_on_gpu():
        captured = capture(Norms(), lambda y, _: y.mean(), (x, x))

    (region,) = captured.model.regions
    kept = sum(spec.nbytes for spec in region.saved)
    in_parts = capture(Norms(), lambda y, _: y.mean(), (x, x)).model.regions[0]
    more = sum(spec.nbytes for spec in in_parts.saved) - kept
    assert more >= 2 * 32 * 64 * 4 - 32 * 64 * 2, "parts of the norm are kept in float32"
    assert region.operators[F] + 5 < in_parts.operators[F]
    code = captured.described.graphs[region.code]
    for phase, name in {F: "rms_norm_forward", B: "rms_norm_backward"}.items():
        assert sum(name in str(node.target) for node in code[phase].graph.nodes) == 1


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_norm_that_no_kernel_fits_stays_in_parts() -> None:
    """As on a GPU: its weight has another type."""
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert not has_kernel(x, torch.ones(64))

    with as_on_gpu():
        captured = capture(Norms(torch.float32), lambda y, _: y.mean(), (x, x))

    code = captured.described.graphs[captured.model.regions[0].code]
    assert not any("piper.rms_norm" in str(node.target) for node in code[F].graph.nodes)


def test_training_on_a_cpu_has_the_operators_of_a_cpu() -> None:
    """Gradients then add up in the order in which autograd adds them."""
    x = torch.randn(4, 64, dtype=torch.bfloat16)

    captured = capture(Norms(), lambda y, _: y.mean(), (x, x))

    code = captured.described.graphs[captured.model.regions[0].code]
    assert not any("piper.rms_norm" in str(node.target) for node in code[F].graph.nodes)
