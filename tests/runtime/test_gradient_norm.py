"""The norm that gradients are clipped by is right, however long a shard is."""

import pytest
import torch

from piper.runtime.gradient_norm import clip, square


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_long_shards_have_the_norm_of_their_numbers(dtype: torch.dtype) -> None:
    grads = [torch.randn(size).to(dtype) for size in (2**20, 3, 0)]
    wanted = torch.cat([grad.double() for grad in grads]).square().sum()

    torch.testing.assert_close(square(grads), wanted, rtol=1e-12, atol=0.0)


def test_types_may_be_mixed() -> None:
    grads = (torch.full((4,), 2.0), torch.full((9,), 2.0, dtype=torch.bfloat16))

    assert square(grads).item() == 52.0


def test_nothing_has_no_norm() -> None:
    assert square(()).item() == 0.0


def test_clipping_is_that_of_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    parameter.grad = torch.arange(5.0, dtype=torch.float64)
    grads = (parameter.grad.clone(),)

    clip(grads, square(grads).sqrt(), 0.5)
    torch.nn.utils.clip_grad_norm_([parameter], 0.5)

    torch.testing.assert_close(grads[0], parameter.grad, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_have_norms_and_are_clipped(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=dtype))
    parameter.grad = torch.randn(5, dtype=dtype)
    grads = (parameter.grad.clone(),)

    norm = square(grads).sqrt()
    clip(grads, norm, 0.5)
    wanted = torch.nn.utils.clip_grad_norm_([parameter], 0.5)

    torch.testing.assert_close(norm, wanted.double(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(grads[0], parameter.grad)


def test_the_factor_is_not_rounded_to_the_gradients_type() -> None:
    grads = (torch.full((1000,), 1.0, dtype=torch.bfloat16),)

    clip(grads, torch.tensor(3.0, dtype=torch.float64), 1.0039)

    assert grads[0][0].item() == torch.tensor(1.0039 / 3.000001).bfloat16().item()
