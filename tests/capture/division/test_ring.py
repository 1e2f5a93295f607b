"""Attention as a ring of devices, block by block, against torch's attention, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from capture.division.trials import joined, piece
from draws import drawn, draws, one_of
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from piper.capture.graphs.division.calls import Call, Emitter, packet
from piper.capture.graphs.division.ring import in_blocks, why_not
from piper.capture.graphs.division.rules import localized, options_of
from piper.capture.kernels import attention_block
from piper.ir.placement.placements import Cut, Placement, Returned, Shifted

aten = torch.ops.aten
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    """One attention. `mask`: none, causal, or what kind of tensor."""

    ways: int
    zigzag: bool
    mask: str
    grouped: bool = False
    seed: int = 0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        tokens, heads = 8 * self.ways, 2 if self.grouped else 4
        shapes = (2, 4, tokens, 3), (2, heads, tokens, 3), (2, heads, tokens, 5)
        return tuple(torch.randn(s, generator=draw, dtype=torch.float64) * 2 for s in shapes)

    def given(self) -> dict[str, Any]:
        tokens, draw = 8 * self.ways, torch.Generator().manual_seed(self.seed + 1)
        lower = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        kept = torch.arange(tokens) < torch.tensor([tokens - 5, tokens // 2]).view(2, 1, 1, 1)
        masks = {
            "padded": kept,
            "causal and padded": lower & kept,
            "causal, padded at the start": lower & ~kept,  # whose first queries see no key
            "window": lower & ~lower.tril(-5),
            "biases": torch.randn(1, 4, tokens, tokens, generator=draw, dtype=torch.float64),
            "least number": torch.zeros(2, 1, tokens, tokens, dtype=torch.float64).masked_fill(
                ~(lower & kept), torch.finfo(torch.float64).min
            ),
        }
        mask = masks.get(self.mask)
        given = {"attn_mask": mask, "is_causal": self.mask == "causal"}
        return {**given, "enable_gqa": self.grouped}


MASKS = (
    "none", "causal", "padded", "causal and padded", "causal, padded at the start", "window",
    "biases", "least number",
)  # fmt: skip
CASES = [Case(*one) for one in product((2, 4), (False, True), MASKS, (False, True))]


def ring(case: Case) -> tuple[fx.Graph, fx.Node, Any]:
    """The attention as nodes of a ring, and the mode of its values."""
    graph, mode = fx.Graph(), torch._subclasses.FakeTensorMode()
    given = case.given()
    tensors = [*case.tensors(), *([given["attn_mask"]] if given["attn_mask"] is not None else [])]
    nodes = [graph.placeholder(f"x{k}") for k in range(len(tensors))]
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["val"] = mode.from_tensor(tensor)
    kwargs = {**given, "attn_mask": nodes[3] if len(nodes) > 3 else None}
    node = graph.call_function(aten.scaled_dot_product_attention.default, tuple(nodes[:3]), kwargs)
    node.meta["val"] = mode.from_tensor(torch.empty(2, 4, 8 * case.ways, 5, dtype=torch.float64))
    call = Call(node, case.ways, zigzag=case.zigzag)
    assert why_not(call, nodes) == ""
    with mode:
        return graph, in_blocks(call, Emitter(graph, {}, node)), mode


def run(case: Case, mistake: Any = None) -> tuple[Tensor, list[Tensor]]:
    """The result and the gradients of all devices, put together."""
    graph, result, mode = ring(case)
    leaves = [tensor.requires_grad_() for tensor in case.tensors()]
    given = [*leaves, case.given()["attn_mask"]]
    whole = dict(zip(graph.find_nodes(op="placeholder"), given, strict=False))
    pair = next(node for node in graph.nodes if packet(node) is aten.cat)
    whole[pair] = torch.cat(leaves[1:], -1)
    devices = [Device(case, mode, rank, whole, mistake).run(result) for rank in range(case.ways)]
    found = joined(devices, Cut(2, 1, case.zigzag))
    found.backward(cotangent(found))
    return found, [leaf.grad for leaf in leaves]


class Device:
    """Runs the blocks of one device on pieces of whole tensors, each where it has travelled to."""

    def __init__(self, case: Case, mode: Any, rank: int, whole: dict, mistake: Any) -> None:
        self.case, self.mode, self.rank, self.whole, self.mistake = case, mode, rank, whole, mistake
        self.graph, self.there, self.arguments = fx.Graph(), {}, []
        self.emit = Emitter(self.graph, {}, self.argument(torch.tensor(rank)))

    def argument(self, tensor: Tensor) -> fx.Node:
        made = self.graph.placeholder(f"a{len(self.arguments)}")
        made.meta["val"] = self.mode.from_tensor(tensor.detach().contiguous())
        self.arguments.append(tensor)
        return made

    def run(self, result: fx.Node) -> Tensor:
        nodes = (node for node in result.graph.nodes if node not in self.whole)
        own = [node for node in nodes if packet(node) is not aten.scaled_dot_product_attention]
        for node in own:
            self.there[node] = self.made(node)
        self.graph.output(self.there[result])
        return fx.GraphModule({}, self.graph)(*self.arguments)

    def made(self, node: fx.Node) -> fx.Node:
        call = Call(node, self.case.ways, zigzag=self.case.zigzag)
        option = options_of(call)[-1]
        read = dict(zip(call.operands, option.inputs, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.form(n, read[n]))
        if self.mistake:
            args = self.mistake(node, args)
        with self.mode:
            return localized(call, option, self.emit, args, kwargs)

    def form(self, node: fx.Node, placement: Placement) -> fx.Node:
        if isinstance(placement, Returned):
            return self.returned(node)
        if node not in self.whole:
            return self.there[node]
        key = node, placement
        if key not in self.there:
            tensor = piece(self.whole[node], placement, self.case.ways, self.rank)
            self.there[key] = self.argument(tensor)
        return self.there[key]

    def returned(self, token: fx.Node) -> fx.Node:
        """Its gradient is what the next device sends back: the keys and values of this step."""
        step = token.args[0].args[4]
        (pair,) = (node for node in self.whole if packet(node) is aten.cat)
        made = self.form(pair, Shifted(Cut(2, 1, self.case.zigzag), step))
        found = self.graph.call_function(again, (self.there[token], made))
        found.meta["val"] = made.meta["val"]
        return found


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, pair: Tensor) -> Tensor:
        ctx.save_for_backward(pair)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0].detach(), None


def again(token: Tensor, pair: Tensor) -> Tensor:
    return Again.apply(token, pair)


def cotangent(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(9), dtype=like.dtype)


def expected(case: Case) -> tuple[Tensor, list[Tensor]]:
    leaves = [tensor.requires_grad_() for tensor in case.tensors()]
    found = scaled_dot_product_attention(*leaves, **case.given())
    found.backward(cotangent(found))
    return found, [leaf.grad for leaf in leaves]


def compare(case: Case, mistake: Any = None) -> None:
    found, gradients = run(case, mistake)
    wanted, wanted_gradients = expected(case)
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE * 10)


@one_of(2)
@drawn
@pytest.mark.parametrize("mask", MASKS)
def test_a_ring_is_attention(mask: str) -> None:
    cases = [case for case in CASES if case.mask == mask]

    for case in Random(mask).sample(cases, draws(1, len(cases))):
        compare(case)


@pytest.mark.parametrize("slices", [1, 3, 16])
def test_scores_are_made_slice_by_slice(slices: int, monkeypatch) -> None:
    monkeypatch.setattr(attention_block, "SCORES", 2 * 4 * 8 * 2 * slices)

    compare(Case(2, False, "causal and padded", grouped=True))


def wrong(at: int, **changed: Any) -> Any:
    """A block that is told another step, or that ignores the order of tokens."""
    position = {"step": 4, "causal": 6}
    blocks = torch.ops.piper.ring_block, torch.ops.piper.ring_passing

    def mistake(node: fx.Node, args: tuple) -> tuple:
        if packet(node) not in blocks or args[4] != at:
            return args
        made = list(args)
        for name, new in changed.items():
            made[position[name]] = new
        return tuple(made)

    return mistake


MISTAKES = {
    "keys that come later are seen": (Case(2, False, "causal"), wrong(1, causal=False)),
    "its own later keys are seen": (Case(2, True, "causal"), wrong(0, causal=False)),
    "the mask of another step": (Case(4, False, "padded"), wrong(2, step=1)),
    "all keys are seen in a zigzag": (Case(2, True, "causal"), wrong(1, causal=False)),
    "keys of another device, in order": (Case(4, True, "causal"), wrong(3, step=2)),
}


@one_of(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match="not close"):
        compare(*MISTAKES[name])


@pytest.mark.parametrize(
    ("case", "change", "reason"),
    [
        (Case(2, False, "none"), {"dropout_p": 0.1}, "it drops out scores"),
        (Case(3, True, "none"), {"ways": 7}, "its 24 tokens cannot be cut in 14 equal parts"),
    ],
)
def test_what_cannot_be_a_ring(case: Case, change: dict[str, Any], reason: str) -> None:
    graph, _, _ = ring(case)
    node = next(n for n in graph.nodes if packet(n) is aten.scaled_dot_product_attention)
    ways = change.pop("ways", case.ways)
    node.kwargs = {**node.kwargs, **change}

    assert why_not(Call(node, ways, zigzag=case.zigzag), ()) == reason
