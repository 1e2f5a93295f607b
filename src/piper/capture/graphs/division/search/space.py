"""What there is to choose: the nodes of a graph that depend on parameters, and their options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import fx

from piper.capture.fx_nodes import line, value
from piper.capture.graphs.division import expert_rows, refusals
from piper.capture.graphs.division.blocks import block_counts
from piper.capture.graphs.division.calls import Call, Option, operands, packet, shape, tensors
from piper.capture.graphs.division.rules import options_of
from piper.capture.graphs.division.rules.convolutions import DIMENSIONS as CONVOLUTIONS
from piper.capture.graphs.division.search.hubs import hubs_of
from piper.capture.graphs.division.search.joined import joined
from piper.capture.graphs.division.search.order import depth_first
from piper.capture.graphs.division.search.prices import Prices
from piper.capture.trace.arguments.inputs import spec_of
from piper.ir.placement.division import DivisionRequest
from piper.ir.placement.placements import Cut, Invariant, Partial, Placement, Replicated, divides
from piper.ir.values import TensorSpec


@dataclass(frozen=True, slots=True)
class Held:
    """How a device holds a parameter, and what that costs."""

    placement: Placement
    price: float


@dataclass
class Space:
    """A graph whose nodes are to get placements.

    `free` nodes depend on no parameter: every device computes them, wherever they are read.
    """

    graph: fx.Graph
    requests: dict[fx.Node, DivisionRequest]  # of each node that is divided
    parameters: dict[fx.Node, str]
    batch: list[fx.Node]
    joins: set[fx.Node] = field(default_factory=set)  # whole, between regions divided otherwise
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        self.free = independent(self.graph, self.parameters)
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        chosen = [node for node in calls if node not in self.free]
        self.groups = [group for group in hubs_of(chosen) if all(map(self._is_divided, group))]
        self.hubs = {hub: k for k, group in enumerate(self.groups) for hub in group}
        self.order = depth_first(chosen, self.hubs)
        self.joined = joined([n for n in self.order if n not in self.hubs], self.requests)
        dense = [node for node in self.order if not self.is_expert(node)]
        self.blocks = block_counts(dense)
        self.start = self.prices.message * _typical(dense)
        self.batch_cuts = self._batch_cuts([n for n in calls if not self.is_expert(n)])
        self.options = {node: list(self._options(node)) for node in self.order}
        self._refuse_seeds()
        uses: dict[fx.Node, int] = {}
        for node in self.order:
            for operand in dict.fromkeys(operands(node)):
                uses[operand] = uses.get(operand, 0) + 1
        self.shared = [node for node in self.parameters if uses.get(node, 0) > 1]

    def call(self, node: fx.Node) -> Call:
        request = self.requests[node]
        return Call(node, request.ways, self.blocks.every, request.is_zigzag)

    def is_expert(self, node: fx.Node) -> bool:
        """Whether it is in a region of experts, of which each device takes some rows."""
        return node in self.requests and self.requests[node].what == "experts"

    def _is_divided(self, node: fx.Node) -> bool:
        """Whether its placement is to be chosen."""
        return node in self.requests and node not in self.joins and not self.is_expert(node)

    def ways_in(self, nodes: Iterable[fx.Node]) -> int:
        """Over how many devices the run of these nodes is divided."""
        found = (self.requests[node].ways for node in nodes if node in self.requests)
        return next(found, 1)

    def ways_of(self, node: fx.Node) -> int:
        """Over how many devices a value is divided: where it is made, or else where it is read."""
        return self.ways_in((node, *node.users))

    def whole(self, parameter: fx.Node) -> TensorSpec:
        return spec_of(value(parameter))

    def _refuse_seeds(self) -> None:
        every = {id(request): request for request in self.requests.values()}.values()
        names = list(self.parameters.values())
        for key in (key for request in every for key in request.seeds):
            if not any(fnmatchcase(name, key) for name in names):
                raise refusals.seed_without_parameter(key, names)
        for node, options in self.options.items():
            if not options:
                seeds = {n: self._seed(node, n) for n in operands(node) if n in self.parameters}
                wanted, cut = next((n, s) for n, s in seeds.items() if isinstance(s, Cut))
                name, ways = self.parameters[wanted], self.requests[node].ways
                if not divides(shape(wanted), cut, ways):
                    raise refusals.seed_that_does_not_divide(name, cut.dim, shape(wanted), ways)
                raise refusals.seed_not_possible(name, cut.dim, line(node))

    def _seed(self, node: fx.Node, parameter: fx.Node) -> Placement | None:
        return seed_of(self.requests[node], self.parameters[parameter])

    def _options(self, node: fx.Node) -> Iterator[Option]:
        if node not in self.requests or node in self.joins:
            yield Option((Invariant(),) * len(operands(node)), Invariant())
            return
        if self.is_expert(node):
            yield expert_rows.option(self, node)
            return
        for option in options_of(self.call(node)):
            arguments = zip(operands(node), option.inputs, strict=True)
            if self._may_be(node, option.output) and all(
                self._may_read(node, *argument) for argument in arguments
            ):
                yield option

    def _may_be(self, node: fx.Node, placement: Placement) -> bool:
        useful = not isinstance(placement, Cut) or self.blocks.useful(node, placement)
        return useful and placement not in self.batch_cuts.get(node, ())

    def _may_read(self, node: fx.Node, operand: fx.Node, placement: Placement) -> bool:
        if operand in self.parameters:
            return self.held(node, operand, placement) is not None
        if operand in self.free and isinstance(placement, Partial):
            return False  # it is whole on every device
        return self._may_be(operand, placement)

    def held(self, node: fx.Node, parameter: fx.Node, read: Placement) -> Held | None:
        """How a device best holds a parameter that `node` reads so."""
        request = self.requests.get(node)
        if request is None:
            return Held(read, 0.0)
        name = self.parameters[parameter]
        seed, lies = seed_of(request, name), request.held.get(name)
        found = [
            Held(placement, self._price(request, parameter, placement, read))
            for placement in held_for(read)
            if seed in (None, placement)
            and (lies is None or is_same_piece(placement, lies))
            and not (request.what == "tokens" and isinstance(placement, Cut))
        ]
        return min(found, key=lambda held: held.price, default=None)

    def _price(
        self, request: DivisionRequest, parameter: fx.Node, placement: Placement, read: Placement
    ) -> float:
        size, prices = value(parameter).nbytes, self.prices
        if isinstance(placement, Cut):
            return 0.0
        matrix = sum(extent > 1 for extent in shape(parameter)) > 1
        large = matrix and request.what == "weights"
        kept = size * (prices.matrix if large else prices.written)
        added = size * prices.summed if isinstance(placement, Replicated) else 0.0
        sliced = size * prices.written if isinstance(read, Cut) else 0.0
        return kept + added + sliced

    def _batch_cuts(self, calls: list[fx.Node]) -> dict[fx.Node, set[Cut]]:
        """Placements that would cut the batch: `Split` and replicas do that.

        Behind a convolution, rows may be divided: it makes tokens of pictures, which have none.
        """
        every = self.blocks.every
        some = next(iter(self.requests.values()))
        found = {
            node: {Cut(0, b, zigzag) for b in every for zigzag in (False, True)}
            for node in self.batch
        }
        for node in (one for one in calls if packet(one) not in CONVOLUTIONS):
            if any(operand in found for operand in operands(node)):
                how = self.requests.get(node, some)
                found[node] = set(_cuts(Call(node, how.ways, every, how.is_zigzag), found))
        return found


def _typical(nodes: list[fx.Node]) -> float:
    """Bytes of a typical activation."""
    sizes = sorted(tensors(node)[0].nbytes for node in nodes)
    return sizes[len(sizes) // 2] if sizes else 0.0


def seed_of(request: DivisionRequest, name: str) -> Placement | None:
    """The placement that the user wants for a parameter. A name may be a pattern."""
    return next((p for key, p in request.seeds.items() if fnmatchcase(name, key)), None)


def is_same_piece(one: Placement, other: Placement) -> bool:
    """Whether each device has the same elements: what is whole may have any kind of gradient."""
    return one == other or not (isinstance(one, Cut) or isinstance(other, Cut))


def held_for(read: Placement) -> Iterator[Placement]:
    """How a parameter may be held to be read so: as it is read, or whole, and a piece is read."""
    if not isinstance(read, Partial):
        yield read
    if isinstance(read, Cut):
        yield Replicated()


def _cuts(call: Call, known: dict[fx.Node, set[Cut]]) -> Iterator[Cut]:
    for option in options_of(call):
        arguments = zip(call.operands, option.inputs, strict=True)
        if isinstance(option.output, Cut) and any(
            p in known.get(node, ()) for node, p in arguments
        ):
            yield option.output


def independent(graph: fx.Graph, parameters: dict[fx.Node, str]) -> set[fx.Node]:
    """Nodes that depend on no parameter."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "output" and node not in parameters and free.issuperset(node.all_input_nodes):
            free.add(node)
    return free
