"""The search finds the cheapest placements, without trying all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.capture.fx_nodes import value
from piper.capture.graphs.division import equivalents
from piper.capture.graphs.division.calls import operands
from piper.capture.graphs.division.search import hubs, joined
from piper.capture.graphs.division.search.chain import cheapest, near
from piper.capture.graphs.division.search.conversions import Conversions
from piper.capture.graphs.division.search.frontier import Frontier
from piper.capture.graphs.division.search.moves import Moves
from piper.capture.graphs.division.search.order import depth_first
from piper.capture.graphs.division.search.plan import search
from piper.capture.graphs.division.search.segments import (
    Matrix,
    Segment,
    Solution,
    last_uses,
    segments_of,
)
from piper.capture.graphs.division.search.space import Space
from piper.capture.trace.cleanup import clean
from piper.capture.trace.forward import Traced, trace
from piper.capture.trace.grad_modes import modes_of
from piper.ir.placement.division import DivisionRequest, What
from piper.ir.placement.placements import Conversion, Invariant, Partial, Replicated, Step, sent
from piper.models.llama import Llama, LlamaConfig, cross_entropy


class Block(nn.Module):
    """A feed-forward block with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def space_of(count: int, ways: int = 2) -> tuple[Space, torch.fx.Node]:
    x = torch.zeros(2, 4, 8)
    traced = trace(Blocks(count), lambda y, _: y.sum(), (x, x), "cpu")
    clean(traced)
    return divided_space(traced, ways), traced.results[0]


def divided_space(traced: Traced, ways: int, what: What = "weights") -> Space:
    """All of a graph is divided."""
    request = DivisionRequest(regions=(), ways=ways, what=what)
    modes = modes_of(traced.root.graph)
    with traced.mode:
        calls = {node: modes[node] for node in modes if node.op == "call_function"}
        equivalents.rewrite(calls, ways, what)
    traced.root.graph.eliminate_dead_code()
    nodes = [node for node in traced.root.graph.nodes if node.op == "call_function"]
    parameters = {traced.weights[name]: name for name in traced.parameters}
    used = {node: name for node, name in parameters.items() if node.users}
    return Space(traced.root.graph, dict.fromkeys(nodes, request), used, traced.batch)


@pytest.mark.parametrize("ways", [2, 4])
def test_what_is_left_out_is_never_better(ways: int, monkeypatch: pytest.MonkeyPatch) -> None:
    space, result = space_of(1, ways)
    last = last_uses(space, result)
    segment = max(segments_of(space, last), key=lambda one: len(one.nodes))
    frontier = Frontier(Moves(Conversions(space), {}), segment.entry, segment.nodes, last)
    entries = {option.output for option in space.options[segment.entry]}

    for entry in entries:
        quick = frontier.run(entry)
        with monkeypatch.context() as patch:
            patch.setattr(Frontier, "_pruned", lambda self, step, found, width: found)
            every, _ = frontier._run(entry, math.inf, 0)
        best = min(cost for cost, _ in every.values())
        assert min(cost for cost, _ in quick.values()) == pytest.approx(best, rel=1e-12)


def test_equal_layers_are_solved_once_and_stay_equal() -> None:
    space, result = space_of(3)

    plan = search(space, result)

    segments = segments_of(space, last_uses(space, result))
    blocks = [one for one in segments if len(one.nodes) > 3]
    assert len({one.key for one in blocks}) == 1
    chosen = [[plan.options[node] for node in one.nodes] for one in blocks]
    assert len(blocks) == 3
    assert chosen[0] == chosen[1] == chosen[2]


def test_more_layers_cost_more_by_the_same_each() -> None:
    one, two, three = (search(*space_of(count)).cost for count in (3, 5, 7))

    assert three - two == pytest.approx(two - one, rel=1e-9)


def test_what_is_whole_on_every_device_is_not_a_part_of_a_sum() -> None:
    model = nn.Linear(8, 8, bias=False)
    x = torch.zeros(4, 8)
    traced = trace(model, lambda y, z: (y + z).sum(), (x, x), "cpu")
    clean(traced)
    calls = [node for node in traced.root.graph.nodes if node.op == "call_function"]
    requests = dict.fromkeys(calls, DivisionRequest(regions=(), ways=2, what="weights"))
    space = Space(traced.root.graph, requests, {traced.weights["weight"]: "weight"}, traced.batch)

    added = next(node for node in calls if "add" in str(node.target))

    assert space.options[added]
    assert not any(isinstance(option.inputs[1], Partial) for option in space.options[added])


def test_a_depth_first_order_keeps_arguments_before_their_readers() -> None:
    space, _ = space_of(2)

    order = depth_first(space.order[::-1])

    place = {node: k for k, node in enumerate(order)}
    assert set(order) == set(space.order)
    assert all(
        place[need] < place[node]
        for node in order
        for need in node.all_input_nodes
        if need in place
    )


WIDTHS = [  # dim, hidden, heads, key heads, rows, tokens, vocabulary
    (16, 32, 4, 4, 1, 4096, 64), (16, 32, 4, 4, 3, 8, 64), (8, 16, 4, 4, 4, 4, 16),
    (32, 64, 4, 4, 1, 128, 64),
    (64, 256, 8, 8, 4, 16, 64), (64, 128, 4, 2, 2, 16, 256), (128, 512, 8, 4, 2, 8, 512),
]  # fmt: skip


def bytes_sent(sizes: tuple[int, ...], layers: int, ways: int, what: What) -> float:
    """What a device sends in a step of a Llama, in whole tensors of its hidden state."""
    dim, hidden, heads, keys, rows, length, vocabulary = sizes
    config = LlamaConfig(
        layers=layers, dim=dim, hidden=hidden, heads=heads, kv_heads=keys, vocab=vocabulary
    )
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    traced = trace(Llama(config), cross_entropy, (tokens, tokens), "cpu")
    clean(traced)
    plan = search(divided_space(traced, ways, what), traced.results[0])
    sizes_sent = (
        sent(step, value(read.value).nbytes, ways)
        for read in plan.reads
        for conversion in [Conversion(read.source, read.target)]
        for step in (conversion.forward, conversion.backward)
    )
    return sum(sizes_sent) / (rows * length * dim * 4)


def of_a_layer(sizes: tuple[int, ...], ways: int, what: What) -> float:
    return bytes_sent(sizes, 3, ways, what) - bytes_sent(sizes, 2, ways, what)


EVERY = [(sizes, ways) for sizes in WIDTHS for ways in (4, 2) if sizes[3] % ways == 0]
CASES = [EVERY[0], *(pytest.param(*one, marks=pytest.mark.soak) for one in EVERY[1:])]


@pytest.mark.soak  # tests/capture/division/test_models.py has one of them
@pytest.mark.parametrize(("sizes", "ways"), EVERY, ids=str)
def test_a_layer_sends_what_megatron_sends_whatever_its_widths(
    sizes: tuple[int, ...], ways: int
) -> None:
    wanted = 4 * sent(Step.ALL_REDUCE, 1, ways)
    assert of_a_layer(sizes, ways, "weights") == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("sizes", "ways"), CASES, ids=str)
def test_tokens_travel_as_ulysses_sends_them_whatever_the_widths(
    sizes: tuple[int, ...], ways: int
) -> None:
    """No device ever has all tokens of a layer: q, k, v and the result exchange heads."""
    _, _, heads, keys, *_ = sizes
    wanted = (2 + 2 * keys / heads) * 2 * sent(Step.ALL_TO_ALL, 1, ways)  # there and back
    assert of_a_layer(sizes, ways, "tokens") == pytest.approx(wanted, rel=1e-9)


@pytest.mark.soak
@pytest.mark.parametrize("ways", [4, 8])
def test_keys_and_values_are_gathered_where_heads_do_not_divide(ways: int) -> None:
    sizes = (16, 32, 4, 2, 1, 4096, 64)
    each = sent(Step.ALL_GATHER, 1, ways) + sent(Step.REDUCE_SCATTER, 1, ways)

    assert of_a_layer(sizes, ways, "tokens") == pytest.approx(2 * (2 / 4) * each, rel=1e-9)


class Reader(nn.Module):
    """A decoder's layer: after a block of its own, it reads what an encoder gives."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.norm = Block(), nn.LayerNorm(8)
        self.keys, self.out = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.queries = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.own(x)
        return x + self.out(self.queries(self.norm(x)) * torch.tanh(self.keys(memory)))


class EncoderDecoder(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.encoder, self.first = Blocks(1), nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(Reader() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        memory, y = self.encoder(x), self.first(x)
        for layer in self.layers:
            y = layer(y, memory)
        return y


def encoder_decoder(count: int) -> tuple[Space, torch.fx.Node]:
    x = torch.zeros(2, 4, 8)
    traced = trace(EncoderDecoder(count), lambda y, _: y.sum(), (x, x), "cpu")
    clean(traced)
    return divided_space(traced, 2), traced.results[0]


def test_what_every_layer_of_a_decoder_reads_is_placed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As cheap as by a search through all of its placements in all layers at once."""
    monkeypatch.setattr(hubs, "APART", 8)  # these layers are short
    space, result = encoder_decoder(3)
    (memory,) = space.hubs
    assert sum(memory in operands(node) for node in space.order) == 3
    longest = max(len(one.nodes) for one in segments_of(space, last_uses(space, result)))
    found = search(space, result)

    monkeypatch.setattr(hubs, "MOST", 0)
    whole, result = encoder_decoder(3)
    assert not whole.hubs
    assert max(len(one.nodes) for one in segments_of(whole, last_uses(whole, result))) > longest
    assert found.cost == pytest.approx(search(whole, result).cost)


def test_a_residual_is_no_hub() -> None:
    assert not space_of(6)[0].hubs


class SideBySide(nn.Module):
    """Two branches of one layer read its norm, the second long after the first, as in Falcon."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one = nn.LayerNorm(8), nn.Linear(8, 24, bias=False)
        self.other, self.out = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        a, b, c = self.one(y).chunk(3, -1)
        return x + torch.tanh(a * b).exp() * c.sigmoid() + self.out(self.other(y))


def test_branches_of_one_layer_make_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each layer would have a hub of its own, and no two of them would be equal."""
    monkeypatch.setattr(hubs, "APART", 4)
    x = torch.zeros(2, 4, 8)
    layers = nn.Sequential(SideBySide(), SideBySide())
    traced = trace(layers, lambda y, _: y.sum(), (x, x), "cpu")
    clean(traced)

    assert not divided_space(traced, 2).hubs


def test_an_equal_segment_may_lack_a_way_in() -> None:
    """Its own neighbours read it otherwise."""
    segment = Segment(None, tuple(space_of(1)[0].order[:1]), "equal")
    whole = Solution(segment, 1.0, ())
    matrices: list[Matrix] = [
        {None: {Invariant(): whole, Partial(): whole}},
        {Invariant(): {Invariant(): whole}},
    ]
    segments = [segment, replace(segment, key="other")]
    cost, _ = cheapest(segments, lambda one: matrices[segments.index(one)])[Invariant()]
    assert cost == 2.0


class Joined(nn.Module):
    """The tokens of a sequence one by one, and all of them together again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found = [token.sigmoid() for token in self.up(x).unbind(1)]
        return x + self.down(torch.stack(found, 1))


def joined_space() -> tuple[Space, torch.fx.Node]:
    x = torch.zeros(2, 4, 8)
    traced = trace(Joined(), lambda y, _: y.sum(), (x, x), "cpu")
    clean(traced)
    return divided_space(traced, 2), traced.results[0]


def test_values_that_are_joined_get_one_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cheap as by a search through all of their placements."""
    space, result = joined_space()
    found = search(space, result)
    tokens = {*space.joined, *space.joined.values()}
    assert len(tokens) == 4
    assert len({found.options[node].output for node in tokens}) == 1

    monkeypatch.setattr(joined, "FEW", 4)
    every, result = joined_space()
    assert not every.joined
    assert found.cost == pytest.approx(search(every, result).cost)


def test_only_ways_that_are_nearly_the_cheapest_are_looked_at_closely() -> None:
    entry, *_ = nodes = space_of(1)[0].order[:3]
    segments = [Segment(None, (entry,), "a"), Segment(entry, (nodes[1],), "b")]
    costs = {Invariant(): 100.0, Partial(): 100.4, Replicated(): 101.0}
    matrices: dict[object, Matrix] = {
        "a": {None: {place: Solution(segments[0], 1.0, ()) for place in costs}},
        "b": {
            place: {Invariant(): Solution(segments[1], cost, (), place)}
            for place, cost in costs.items()
        },
    }

    found = near(segments, lambda segment: matrices[segment.key], 0.005)

    assert found == {"a": {None}, "b": {Invariant(), Partial()}}
