"""Cut a graph in program order into maximal runs of operations with the same marks."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from piper.capture.marks.annotate import KEY, Path
from piper.ir.placement.placements import Conversion

EXPERTS = "EP"  # the tag of experts, which `Shard` divides: such a region holds nothing else
Identity = tuple[tuple[str, int | None, int], ...]
PIECE = "piper_piece"  # the key of a node's piece in its meta
REQUESTS = "piper_requests"  # of how a node's region is divided, along each axis


@dataclass(frozen=True, slots=True)
class Piece:
    """What a divided region is cut into: work of each device, or a conversion between two."""

    number: int
    axes: tuple[int, ...]  # over how many devices its region is divided, along each axis
    conversion: Conversion | None = None
    axis: int = 0  # of the conversion
    note: str = ""  # which operators a conversion is between


@dataclass
class Run:
    """Consecutive operations that belong to one region."""

    path: Path
    piece: Piece | None = None  # of a divided region
    nodes: list[fx.Node] = field(default_factory=list)


def path_of(node: fx.Node) -> Path:
    return node.meta.get("custom", {}).get(KEY, ())


def piece_of(node: fx.Node) -> Piece | None:
    return node.meta.get(PIECE)


def identity(path: Path) -> Identity:
    return tuple(mark.identity for mark in path)


def find_runs(nodes: list[fx.Node], free: set[fx.Node], weights: set[fx.Node]) -> list[Run]:
    """Cut `nodes` where the marks change.

    Operations without a mark join the run before them, or at the start, the run after them. But if
    all marks are of experts, and operations without a mark use `weights`, the experts are islands
    in the model and not a partition of it. The unmarked operations then form runs of their own.
    Operations in `free` may run anywhere and never form a run of their own. Divided regions are
    cut between their pieces, too.
    """
    islands = _are_islands(nodes, weights)
    first = next((path_of(node) for node in nodes if path_of(node)), ())
    last = () if islands else first[:1]
    runs: list[Run] = []
    for node in nodes:
        path, piece = path_of(node), piece_of(node)
        if not path and piece is None and (node in free or not islands):
            path = last
        if not runs or (identity(runs[-1].path), runs[-1].piece) != (identity(path), piece):
            runs.append(Run(path, piece))
        runs[-1].nodes.append(node)
        last = path if islands else path[:1]
    return runs


def _are_islands(nodes: list[fx.Node], weights: set[fx.Node]) -> bool:
    if any(path_of(node)[0].name != EXPERTS for node in nodes if path_of(node)):
        return False
    return any(not path_of(node) and _uses(node, weights) for node in nodes)


def _uses(node: fx.Node, weights: Iterable[fx.Node]) -> bool:
    return any(argument in weights for argument in node.all_input_nodes)
