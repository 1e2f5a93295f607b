"""The grouped matrix product against a plain loop over experts."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from piper.models.grouped import (
    combine,
    grouped_mm,
    grouped_mm_weight,
    permute_rows,
    sort_by_expert,
)

COUNTS = {
    "even": [2, 2, 2],
    "empty experts": [0, 6, 0],
    "first and last": [1, 0, 5],
    "all to the last": [0, 0, 6],
    "no rows": [0, 0, 0],
    "one expert": [6],
}
UTILS = ("test_schema", "test_autograd_registration", "test_faketensor")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}


def tensors(counts: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(counts), 8, 16, dtype=dtype, requires_grad=True)
    return rows, weight, torch.tensor(counts)


def plain(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    ends = [0, *counts.cumsum(0).tolist()]
    parts = [rows[a:b] @ matrix for (a, b), matrix in zip(pairwise(ends), weight, strict=True)]
    return torch.cat(parts)


def results(function, rows: Tensor, weight: Tensor, counts: Tensor) -> list[Tensor]:
    """The product, and gradients of something that is not the same for every element."""
    output = function(rows, weight, counts)
    return [output, *torch.autograd.grad(output.square().sum(), (rows, weight))]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_it_is_a_loop_over_experts(counts: list[int], dtype: torch.dtype) -> None:
    inputs = tensors(counts, dtype)

    found, expected = results(grouped_mm, *inputs), results(plain, *inputs)

    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_transposed_weight_gets_its_gradient_in_its_own_layout() -> None:
    rows, weight, counts = tensors([1, 0, 5])
    stored = weight.detach().transpose(1, 2).contiguous().requires_grad_()

    found = results(lambda r, w, c: grouped_mm(r, w.transpose(1, 2), c), rows, stored, counts)

    output, of_rows, of_weight = results(plain, rows, weight, counts)
    torch.testing.assert_close(found, [output, of_rows, of_weight.transpose(1, 2)])
    assert found[2].is_contiguous()


def test_a_gradient_is_only_made_for_what_needs_one() -> None:
    rows, weight, counts = tensors([2, 4])

    with FlopCounterMode(display=False) as counter:
        grouped_mm(rows.detach(), weight, counts).sum().backward()

    assert weight.grad is not None
    assert counter.get_total_flops() == 2 * (2 * 6 * 8 * 16)


def test_gradients_are_right_numerically_and_twice() -> None:
    rows, weight, counts = tensors([1, 0, 2])

    assert torch.autograd.gradcheck(grouped_mm, (rows, weight, counts), fast_mode=True)
    assert torch.autograd.gradgradcheck(grouped_mm, (rows, weight, counts), fast_mode=True)


def test_the_operators_are_what_they_say_they_are() -> None:
    rows, weight, counts = tensors([1, 0, 2])
    grad = torch.randn(3, 16, dtype=rows.dtype, requires_grad=True)

    torch.library.opcheck(grouped_mm, (rows, weight, counts), test_utils=UTILS)
    torch.library.opcheck(grouped_mm_weight, (rows, grad, counts), test_utils=UTILS)


def test_flops_do_not_depend_on_who_gets_the_rows() -> None:
    totals = []
    for counts in ([2, 2, 2], [0, 6, 0]):
        rows, weight, sizes = tensors(counts)
        with FlopCounterMode(display=False) as counter:
            grouped_mm(rows, weight, sizes).sum().backward()
        totals.append(counter.get_total_flops())

    assert totals == [3 * (2 * 6 * 8 * 16)] * 2


def test_an_unknown_number_of_rows_goes_through_fake_kernels() -> None:
    def routed(mask: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        rows = mask.nonzero().to(weight.dtype)  # as many as the data says
        output = grouped_mm(rows.requires_grad_(), weight, counts)
        return output, *torch.autograd.grad(output.sum(), (rows, weight))

    inputs = torch.tensor([[1, 0], [1, 1]]), torch.randn(2, 2, 3), torch.tensor([1, 2])
    inputs[1].requires_grad_()
    graph = torch.fx.experimental.proxy_tensor.make_fx(routed, tracing_mode="symbolic")(*inputs)

    torch.testing.assert_close(graph(*inputs), routed(*inputs))
    assert "grouped_mm_weight" in graph.code


def test_sorting_by_expert_is_undone() -> None:
    x, score = torch.randn(5, 3, requires_grad=True), torch.tensor([0.25, 0.75]).expand(5, 2)
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1], [1, 0], [0, 2]])

    rows, order, inverse = sort_by_expert(x, chosen)

    torch.library.opcheck(permute_rows, (rows, order, inverse), test_utils=UTILS)
    experts = chosen.flatten()[order].tolist()
    assert experts == sorted(experts)
    torch.testing.assert_close(rows, x[order // 2])
    torch.testing.assert_close(combine(rows, order, inverse, score), x)


def test_gradients_of_sorting_are_those_of_indexing() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(10, 3, dtype=torch.float64)
    rows, order, _ = sort_by_expert(x, torch.tensor([[2, 0], [0, 1], [2, 1], [1, 0], [0, 2]]))

    found = torch.autograd.grad((rows * weights).sum(), x)

    expected = torch.autograd.grad((x[order // 2] * weights).sum(), x)
    torch.testing.assert_close(found, expected)
