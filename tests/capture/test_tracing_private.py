"""A region that only computes is traced with less of torch. The graph must be the same."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from draws import one_of
from torch import Tensor, fx, nn

from piper.capture import capture, torch_private
from piper.capture.fx_nodes import arguments, value
from piper.capture.torch_private import is_backward, is_functional, pytree
from piper.capture.tracing_private import trace_forward, trace_functional_joint, trace_joint

B, T, D = 3, 4, 8
X, W, V = (B, T, D), (D, D), (D,)


@torch.no_grad()
def untrained(x: Tensor) -> Tensor:
    return x.exp().sum(-1, keepdim=True)


CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (lambda x, w, v: f.linear(x, w, v), [X, W, V]),
    "matrices": (lambda x, w: (x @ w).transpose(1, 2) @ x, [X, W]),
    "norm": (lambda x, v: f.layer_norm(x, (D,), v, v), [X, V]),
    "activations": (lambda x: f.gelu(x) + f.silu(x) * torch.tanh(x).sigmoid(), [X]),
    "softmax": (lambda x: x.softmax(-1).log() - x.log_softmax(-1), [X]),
    "attention": (lambda x: f.scaled_dot_product_attention(x, x, x, is_causal=True), [(1, *X)]),
    "convolution": (lambda x, w: f.conv1d(x, w, padding=1), [X, (D, T, 3)]),
    "pools": (lambda x: f.max_pool1d(x, 2) + f.avg_pool1d(x, 2), [X]),
    "embedding": (lambda x, w: f.embedding(x.argmax(-1), w), [X, W]),
    "picks": (lambda x: x[:, 1:].gather(2, x[:, 1:].argsort(-1)).cumsum(1), [X]),
    "pieces": (lambda x: torch.cat([one.exp() for one in x.chunk(2, -1)], 1)[..., ::2], [X]),
    "shared": (lambda x: x.expand(2, *X).sum(0).var(-1).clamp(0.1), [X]),
    "written": (lambda x, v: f.rms_norm(x, (D,), v), [X, V]),  # to a tensor of its own
    "detached": (lambda x: x * untrained(x), [X]),
    "loss": (lambda x: f.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(-1)), [X]),
}  # fmt: skip


def fakes(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [torch.empty(shape, requires_grad=True) for shape in shapes]


def rows(module: fx.GraphModule) -> list[Any]:
    """What is computed, of which layouts, and which nodes are of the backward."""
    return [
        (node.name, str(node.target), str(inputs(node)), layouts(node), is_backward(node))
        for node in module.graph.nodes
    ]


def inputs(node: fx.Node) -> Any:
    is_operator = isinstance(node.target, torch_private.OpOverload)
    return arguments(node) if is_operator else pytree.tree_leaves(node.args)


def layouts(node: fx.Node) -> list[Any]:
    leaves = pytree.tree_leaves(value(node))
    return [(one.shape, one.stride(), one.dtype) for one in leaves if isinstance(one, Tensor)]


@one_of(3)
@pytest.mark.parametrize("name", CASES)
def test_a_joint_graph_is_the_one_of_torch(name: str) -> None:
    function, shapes = CASES[name]
    with torch_private.new_fake_mode():
        args = fakes(shapes)
        module = trace_forward(function, *args)
        tangent = torch.empty_like(function(*args).clone())

        def run(*args: Tensor) -> tuple[Tensor]:
            return (fx.Interpreter(module).run(*args).clone(),)  # no view

        fast = trace_functional_joint(run, args, [tangent])
        whole = trace_joint(run, args, backward=True)

    assert is_functional(module.graph)
    assert fast is not None
    assert renamed(rows(fast)) == renamed(rows(whole))


def renamed(rows: list[Any]) -> list[Any]:
    """Nodes by number: torch calls the form of `add_` that writes nothing `add`."""
    numbers = {row[0]: f"%{k}" for k, row in enumerate(rows)}
    word = re.compile(r"\b[a-z_]+[0-9_]*\b")
    return [
        (
            target if "." in target else "",
            word.sub(lambda m: numbers.get(m[0], m[0]), inputs),
            *rest,
        )
        for _, target, inputs, *rest in rows
    ]


def test_so_is_a_graph_without_gradients() -> None:
    function = CASES["norm"][0]
    with torch_private.new_fake_mode():
        args = [one.detach() for one in fakes([X, V])]
        fast = trace_functional_joint(lambda *xs: (function(*xs),), args, [])
        whole = trace_joint(lambda *xs: (function(*xs),), args, backward=False)

    assert fast is not None
    assert list(map(layouts, fast.graph.nodes)) == list(map(layouts, whole.graph.nodes))
    assert not any(map(is_backward, fast.graph.nodes))


def test_a_function_that_writes_is_left_to_torch() -> None:
    with torch_private.new_fake_mode():
        args = fakes([X])
        tangents = [args[0].detach()]
        assert trace_functional_joint(lambda x: ((2 * x).add_(1),), args, tangents) is not None
        assert trace_functional_joint(lambda x: ((2 * x).add_(x),), args, tangents) is None
        assert (
            trace_functional_joint(lambda x: ((2 * x)[0].add_(1),), args, [tangents[0][0]]) is None
        )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x > 0],  # of a size that is not known
        lambda x: x * torch.tensor([1.0, 2.0] * 4),  # has a constant
    ],
)
def test_these_are_not_functional(function: Callable[[Tensor], Tensor]) -> None:
    with torch_private.new_fake_mode():
        module = trace_forward(function, *fakes([X]))

    assert not is_functional(module.graph)


class Tracer(nn.Module):
    """Traces its own layer while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, D), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        found = fx.symbolic_trace(self.inner)
        assert any(node.op == "call_module" for node in found.graph.nodes)
        return found(x)


def test_a_model_may_trace_by_itself() -> None:
    captured = capture(
        Tracer(), lambda y, t: f.mse_loss(y, t), (torch.ones(2, D), torch.ones(2, D))
    )

    assert len(captured.model.regions) == 1
