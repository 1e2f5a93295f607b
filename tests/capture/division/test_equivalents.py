"""Operators that are rewritten to be divisible compute the same as before."""

from __future__ import annotations

import pytest
import torch
from capture.division.trials import Trial
from torch import Tensor, fx

from piper.capture.graphs.division.equivalents import EQUIVALENTS, rewrite
from piper.capture.trace.grad_modes import Mode

aten = torch.ops.aten
draw = torch.Generator().manual_seed(0)


def x(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)


def labels(*shape: int) -> Tensor:
    found = torch.randint(0, 12, shape, generator=draw)
    found[1] = -100
    return found


def trial(target, *args, **kwargs) -> Trial:
    return Trial(target, args, kwargs)


TRIALS = [
    trial(aten.linear.default, x(3, 4), x(5, 4), x(5)),
    trial(aten.addmm.default, x(5), x(3, 4), x(4, 5)),
    trial(aten.cat.default, [x(0), x(3, 4), x(2, 4)]),
    trial(
        aten.scaled_dot_product_attention.default, x(2, 12, 4, 2), *(x(2, 1, 4, 2),) * 2,
        is_causal=True, enable_gqa=True,
    ),
    trial(aten.log_softmax.int, x(3, 12), -1),
    trial(aten.cross_entropy_loss.default, x(5, 12) * 9, labels(5)),
    trial(aten.cross_entropy_loss.default, x(5, 12), labels(5).clamp(0), None, 2, 0),
    trial(aten.nll_loss_nd.default, x(5, 12), labels(5)),
]  # fmt: skip
KEPT = [  # these work on whole tensors, then
    trial(aten.cross_entropy_loss.default, x(5, 12), labels(5), x(12).abs()),
    trial(aten.cross_entropy_loss.default, x(5, 12), labels(5), None, 1, -100, 0.1),
    trial(aten.cross_entropy_loss.default, x(5, 12, 2), labels(5, 2).clamp(0)),
    trial(aten.cross_entropy_loss.default, x(5, 12), labels(5), None, 0),
    trial(aten.scaled_dot_product_attention.default, *(x(2, 12, 4, 2) for _ in range(3))),
    trial(aten.log_softmax.int, x(3, 12), 0),
]


def rewritten(one: Trial, ways: int) -> tuple[fx.GraphModule, fx.Node]:
    node = one.call(ways).node
    node.graph.output(node)
    rewrite({node: Mode()}, ways, "weights")
    return fx.GraphModule({}, node.graph), node


def results(function, tensors: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of what has one."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    result = function(*leaves)
    result.backward(torch.linspace(1, 2, result.numel(), dtype=result.dtype).view(result.shape))
    grads = [leaf.grad for leaf in leaves if leaf.requires_grad and leaf.numel()]
    return [result.detach(), *grads]


@pytest.mark.parametrize("one", TRIALS, ids=lambda one: str(one.target))
def test_an_equivalent_gives_the_same_and_has_the_same_gradients(one: Trial) -> None:
    call = one.call(2)
    call.node.graph.output(call.node)
    original = fx.GraphModule({}, call.node.graph)
    tensors = [node.meta["val"] for node in call.node.graph.find_nodes(op="placeholder")]
    expected = results(original, tensors)

    for ways in (2, 3, 4):
        module, node = rewritten(one, ways)

        assert node not in module.graph.nodes
        torch.testing.assert_close(results(module, tensors), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("one", KEPT, ids=lambda one: str(one.target))
def test_what_has_no_equivalent_stays(one: Trial) -> None:
    module, node = rewritten(one, 2)

    assert node.target in {found.target for found in module.graph.nodes}


def test_every_equivalent_is_tried() -> None:
    assert {one.call(2).packet for one in TRIALS} == set(EQUIVALENTS)


def test_a_loss_of_short_numbers_is_summed_in_float32() -> None:
    one = trial(aten.cross_entropy_loss.default, x(5, 12, dtype=torch.bfloat16), labels(5))

    module, _ = rewritten(one, 2)

    found = module(*one.args)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, aten.cross_entropy_loss.default(*one.args), rtol=1e-2, atol=0)
    assert any(node.kwargs.get("dtype") is torch.float32 for node in module.graph.nodes)
