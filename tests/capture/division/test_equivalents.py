"""Operators that are rewritten to be divisible compute the same as before."""

from __future__ import annotations

import operator

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


def forbidden(*shape: int) -> Tensor:
    """The last half of all words is padding, which -inf forbids: all that some devices have."""
    found = x(*shape)
    found[:, shape[1] // 2 :] = -torch.inf
    return found


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
    trial(aten.cross_entropy_loss.default, x(5, 12), labels(5), None, 1, -100, 0.1),
    trial(aten.cross_entropy_loss.default, x(5, 12, 2, 3), labels(5, 2, 3)),
    trial(aten.cross_entropy_loss.default, x(5, 12, 2), labels(5, 2).clamp(0), None, 2, 0, 0.2),
    trial(aten.log_softmax.int, forbidden(3, 12), -1),
    trial(aten.cross_entropy_loss.default, forbidden(5, 12), labels(5) % 6),
    trial(aten.cross_entropy_loss.default, forbidden(5, 12, 2), labels(5, 2) % 6),
    trial(aten.nll_loss_nd.default, forbidden(5, 12), labels(5) % 6),
    trial(aten.nll_loss_nd.default, x(5, 12), labels(5)),
    trial(aten.nll_loss_nd.default, x(5, 12, 2), labels(5, 2)),
    trial(aten.conv1d.default, x(2, 4, 5), x(6, 2, 3), x(6), [2], [1], [1], 2),
    trial(aten.conv2d.default, x(2, 4, 5, 5), x(6, 4, 3, 3), bias=x(6), padding=[1]),
    trial(aten.conv3d.padding, x(2, 4, 3, 3, 3), x(6, 4, 3, 3, 3), x(6), [1], "same"),
    trial(aten.conv_transpose1d.default, x(2, 4, 5), x(4, 3, 3), x(6), [2], [1], [1], 2),
    trial(aten.conv_transpose2d.input, x(2, 4, 3, 3), x(4, 6, 2, 2), bias=x(6)),
    trial(aten.conv_transpose3d.input, x(2, 4, 2, 2, 2), x(4, 6, 2, 2, 2), x(6)),
    trial(aten.glu.default, x(3, 4, 2), 1),
    trial(aten.glu.default, x(3, 4)),
    trial(aten.linalg_norm.default, x(3, 4), None, [-1]),
    trial(aten.linalg_norm.default, x(3, 4), 3, [0], True),
    trial(aten.linalg_norm.default, x(3, 4)),
    trial(aten.baddbmm.default, x(2, 3, 5), x(2, 3, 4), x(2, 4, 5)),
]  # fmt: skip
KEPT = [  # these work on whole tensors, then
    trial(aten.cross_entropy_loss.default, x(5, 12), labels(5), x(12).abs()),
    trial(aten.cross_entropy_loss.default, x(5, 12), labels(5), None, 0),
    trial(aten.cross_entropy_loss.default, x(5, 12), x(5, 12).softmax(1)),
    trial(aten.cross_entropy_loss.default, x(12), labels(2)[0]),
    trial(aten.conv1d.default, x(4, 5), x(6, 4, 3), x(6)),
    trial(aten.linalg_norm.default, x(3, 4), 1, [0, 1]),
    trial(aten.baddbmm.default, x(2, 3, 5), x(2, 3, 4), x(2, 4, 5), alpha=2),
    trial(aten.scaled_dot_product_attention.default, *(x(2, 12, 4, 2) for _ in range(3))),
    trial(aten.scaled_dot_product_attention.default, x(2, 4, 3), x(2, 3, 3), x(2, 3, 3)),
    trial(aten.cat.default, [x(0), x(0)]),
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


FILLED = [
    trial(aten.new_zeros.default, x(3, 4), [2, 5]),
    trial(aten.new_ones.default, x(3, 4), [2], dtype=torch.float32),
    trial(aten.new_full.default, x(3, 4), [2, 3], 7.0),
]


@pytest.mark.parametrize("one", FILLED, ids=lambda one: str(one.target))
def test_a_tensor_that_takes_its_type_from_another_does_not_read_it(one: Trial) -> None:
    module, node = rewritten(one, 2)

    (made,) = (found for found in module.graph.nodes if found.op == "call_function")
    assert not made.all_input_nodes
    wanted = one.target(*one.args, **one.kwargs)
    torch.testing.assert_close(module(*(a for a in one.args if isinstance(a, Tensor))), wanted)


@pytest.mark.parametrize("place", [0, 1])
def test_tensors_that_are_broadcast_together_are_expanded_each_by_itself(place: int) -> None:
    call = trial(aten.broadcast_tensors.default, [x(3, 1), x(4)]).call(2)
    graph = call.node.graph
    one = graph.call_function(operator.getitem, (call.node, place))
    one.meta["val"] = call.node.meta["val"][place]
    graph.output(one)
    tensors = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    wanted = torch.broadcast_tensors(*tensors)[place]

    rewrite({one: Mode()}, 2, "weights")

    graph.eliminate_dead_code()
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [aten.expand.default]
    assert fx.GraphModule({}, graph)(*tensors).equal(wanted)


def test_every_equivalent_is_tried() -> None:
    tried = {one.call(2).packet for one in (*TRIALS, *FILLED)}
    assert {*tried, operator.getitem} == set(EQUIVALENTS)


def test_a_loss_of_short_numbers_is_summed_in_float32() -> None:
    one = trial(aten.cross_entropy_loss.default, x(5, 12, dtype=torch.bfloat16), labels(5))

    module, _ = rewritten(one, 2)

    found = module(*one.args)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, aten.cross_entropy_loss.default(*one.args), rtol=1e-2, atol=0)
    assert any(node.kwargs.get("dtype") is torch.float32 for node in module.graph.nodes)
