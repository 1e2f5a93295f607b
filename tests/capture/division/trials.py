"""Every option of a rule on several devices against one, forward and backward, in float64."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Call, Emitter, Option, tensors
from piper.capture.graphs.division.rules import localized, options_of
from piper.ir.placement.placements import Cut, Invariant, Partial, Placement, Replicated, Shifted

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Trial:
    """One call with real tensors."""

    target: Any
    args: tuple
    kwargs: dict[str, Any]
    blocks: tuple[int, ...] = (1,)

    def call(self, ways: int, zigzag: bool = False) -> Call:
        graph = fx.Graph()

        def placeholder(tensor: Tensor) -> fx.Node:
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = tensor
            return node

        def with_nodes(argument: Any) -> Any:
            if isinstance(argument, Tensor):
                return placeholder(argument)
            if isinstance(argument, list):
                return [with_nodes(one) for one in argument]
            return argument

        args = tuple(map(with_nodes, self.args))
        kwargs = {key: with_nodes(argument) for key, argument in self.kwargs.items()}
        node = graph.call_function(self.target, args, kwargs)
        node.meta["val"] = self.target(*self.args, **self.kwargs)
        return Call(node, ways, self.blocks, zigzag)


def piece(tensor: Tensor, placement: Placement, ways: int, rank: int) -> Tensor:
    """What a device holds. Parts of a sum are random, and add up to the tensor."""
    match placement:
        case Cut(dim, blocks, zigzag):
            cut = tensor.unflatten(dim, (blocks, placement.parts(ways), -1))
            mine = [rank, 2 * ways - 1 - rank] if zigzag else [rank]
            return torch.cat([cut.select(dim + 1, one) for one in mine], dim + 1).flatten(
                dim, dim + 1
            )
        case Shifted(cut, steps):
            return piece(tensor, cut, ways, (rank - steps) % ways)
        case Partial():
            draw = torch.Generator().manual_seed(7)
            noise = [
                (9 * torch.randn(tensor.shape, generator=draw)).to(tensor.dtype)
                for _ in range(ways)
            ]
            return noise[rank] if rank else tensor - sum(noise[1:])
        case _:
            return tensor


def joined(pieces: list[Tensor], placement: Placement) -> Tensor:
    """The whole tensor, from what all devices hold."""
    match placement:
        case Cut(dim, blocks, True):
            halves = [one.unflatten(dim, (blocks, 2, -1)).unbind(dim + 1) for one in pieces]
            split = [*(early for early, _ in halves), *(late for _, late in halves[::-1])]
            return torch.stack(split, dim + 1).flatten(dim, dim + 2)
        case Cut(dim, blocks):
            split = [one.unflatten(dim, (blocks, -1)) for one in pieces]
            return torch.stack(split, dim + 1).flatten(dim, dim + 2)
        case Shifted(cut, steps):
            return joined([*pieces[steps:], *pieces[:steps]], cut)
        case Partial():
            return sum(pieces[1:], pieces[0])
        case _:
            for one in pieces[1:]:
                assert_alike(one, pieces[0])
            return pieces[0]


def assert_alike(found: Tensor, whole: Tensor, pieces: Sequence[Tensor] = ()) -> None:
    """Up to rounding of what was added. What is infinite, or NaN, is so in both."""
    finite = [one[one.isfinite()].to(torch.complex128) for one in (whole, *pieces)]
    largest = max((float(one.abs().max()) for one in finite if one.numel()), default=0.0)
    atol = TOLERANCE * max(1.0, largest)
    torch.testing.assert_close(found, whole, rtol=0, atol=atol, equal_nan=True)


def gradient(placement: Placement) -> Placement:
    """How the gradient of a value with this placement is placed."""
    match placement:
        case Replicated():
            return Partial()
        case Partial():
            return Invariant()
        case _:
            return placement


def options(trial: Trial, ways: int) -> Iterator[Option]:
    return iter(options_of(trial.call(ways)))


def local_module(call: Call, option: Option) -> fx.GraphModule:
    """What every device runs: its pieces of the operands and its rank -> its results."""
    graph, copies = fx.Graph(), {}
    for node, placement in zip(call.operands, option.inputs, strict=True):
        if node not in copies:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = piece(value(node), placement, call.ways, 0)
    rank = graph.placeholder("rank")
    rank.meta["val"] = torch.tensor(0)
    args, kwargs = fx.map_arg((call.node.args, call.node.kwargs), copies.__getitem__)
    result = localized(call, option, Emitter(graph, {}, rank), args, kwargs)
    graph.output(result)
    return fx.GraphModule({}, graph)


def differentiable(found: Any) -> list[Tensor]:
    every = list(found) if isinstance(found, list | tuple) else [found]
    return [tensor for tensor in every if tensor.requires_grad]


def has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not hasattr(tensor, "is_buffer")


def leaves_of(call: Call) -> dict[fx.Node, Tensor]:
    nodes = dict.fromkeys(call.operands)
    return {
        node: value(node).detach().clone().requires_grad_(has_gradient(value(node)))
        for node in nodes
    }


def run_whole(call: Call) -> tuple[dict[fx.Node, Tensor], list[Tensor], list[Tensor]]:
    """(Leaves with their gradients, results, gradients of these) of one process."""
    leaves = leaves_of(call)
    args, kwargs = fx.map_arg((call.node.args, call.node.kwargs), leaves.__getitem__)
    results = call.node.target(*args, **kwargs)
    cotangents = [torch.randn_like(tensor) for tensor in differentiable(results)]
    if cotangents:
        torch.autograd.backward(differentiable(results), cotangents)
    return leaves, list(results) if isinstance(results, list | tuple) else [results], cotangents


def run_option(call: Call, option: Option) -> None:
    """Raise an error if the devices together do not give what one gives."""
    expected, every, cotangents = run_whole(call)
    module = local_module(call, option)
    inputs = dict(zip(call.operands, option.inputs, strict=True))
    devices = [device(call, module, inputs, option, rank, cotangents) for rank in range(call.ways)]
    outputs = [item_placement(call, option, k) for k in range(len(every))]
    for k, tensor in enumerate(every):
        pieces = [made[k] for _, made in devices]
        assert_alike(joined(pieces, outputs[k]), tensor, pieces)
    for node, leaf in expected.items():
        if leaf.grad is not None:
            pieces = [leaves[node].grad for leaves, _ in devices]
            assert_alike(joined(pieces, gradient(inputs[node])), leaf.grad, pieces)


def device(call, module, inputs, option, rank, cotangents):
    """(Leaves with their gradients, results) of one device."""
    leaves = {
        node: piece(value(node), placement, call.ways, rank)
        .detach().clone().requires_grad_(has_gradient(value(node)))
        for node, placement in inputs.items()
    }  # fmt: skip
    results = module(*leaves.values(), torch.tensor(rank))
    every = list(results) if isinstance(results, list | tuple) else [results]
    wanted = [k for k, tensor in enumerate(every) if tensor.requires_grad]
    if wanted:
        back = [
            piece(g, gradient(item_placement(call, option, k)), call.ways, rank)
            for k, g in zip(wanted, cotangents, strict=True)
        ]
        torch.autograd.backward([every[k] for k in wanted], back)
    return leaves, every


def item_placement(call: Call, option: Option, index: int) -> Placement:
    """The placement of one result: the rule for items says it."""
    if len(tensors(call.node)) == 1 or not isinstance(option.output, Cut):
        return option.output
    node = call.node.graph.call_function(operator.getitem, (call.node, index))
    node.meta["val"] = tensors(call.node)[index]
    found = options_of(Call(node, call.ways, call.blocks, call.zigzag))
    return next(one.output for one in found if one.inputs == (option.output,))
