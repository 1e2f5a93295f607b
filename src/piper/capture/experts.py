"""Regions of experts for a share of the experts and whatever number of rows comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture import messages, torch_private
from piper.capture.cut import Chunk
from piper.capture.joint import differentiate
from piper.capture.lower import Lowered
from piper.capture.nodes import value
from piper.capture.partition import partition
from piper.capture.phases import Layout, phase_graphs
from piper.ir.sharding import Contract
from piper.names import Phase

Graphs = dict[Phase, fx.GraphModule]
TRIAL = (2, 0, 3)  # rows of each expert, of a region that is tried out
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of other types: 5e-2


@dataclass(frozen=True)
class ExpertCode:
    """What is needed to make the graphs of a region of experts again, for other sizes."""

    lowered: Lowered
    layout: Layout
    contract: Contract
    mode: Any

    @property
    def chunk(self) -> Chunk:
        return self.lowered.chunk

    @property
    def kinds(self) -> list[str]:
        """What each argument is."""
        weights = len(self.chunk.weights)
        kinds = ["weights"] * weights + ["rows"] * len(self.chunk.inputs)
        kinds[weights + self.contract.counts] = "counts"
        return kinds

    def arguments(self, make: Callable[[Tensor, str], Tensor]) -> list[Tensor]:
        """One tensor for each argument: `make` is told which are weights, rows and counts."""
        nodes = self.chunk.graph.graph.find_nodes(op="placeholder")
        return [make(value(node), kind) for node, kind in zip(nodes, self.kinds, strict=True)]


@dataclass
class ExpertGraphs:
    """The graphs of shares of experts, made when they are first asked for."""

    codes: dict[str, ExpertCode]
    made: dict[tuple[str, int], Graphs] = field(default_factory=dict)
    proven: set[str] = field(default_factory=set)

    def get(self, code: str, ways: int) -> Graphs:
        if (code, ways) not in self.made:
            self.made[code, ways] = share(self.codes[code], ways)
        return self.made[code, ways]

    def prove(self, code: str) -> None:
        """Refuse a region in which experts or rows know of each other."""
        if code not in self.proven:
            refuse_mixing(self.codes[code])
            self.proven.add(code)


def share(found: ExpertCode, ways: int) -> Graphs:
    """The region's graphs for one of `ways` shares of its experts, and any number of rows."""
    lowered, chunk, mode = found.lowered, found.chunk, found.mode
    rows = torch_private.unknown_size(mode)

    def make(tensor: Tensor, kind: str) -> Tensor:
        first = rows if kind == "rows" else tensor.shape[0] // ways
        return tensor.new_empty((first, *tensor.shape[1:]))

    with mode:
        arguments = found.arguments(make)
    wants = [gradient is not None for gradient in lowered.joint.gradients]
    try:
        joint = differentiate(chunk, mode, wants, lowered.given, arguments)
    except Exception as error:
        raise messages.fixed_rows(chunk.source, str(error)) from error
    cut = partition(joint, len(chunk.weights), ())
    same = ("backward_arguments", "weight_arguments", "weight_tangents")
    assert all(getattr(cut, name) == getattr(lowered.cut, name) for name in same)
    return phase_graphs(joint, cut, found.layout, {})


def refuse_mixing(found: ExpertCode) -> None:
    """Try it out on a few rows: all experts at once must give what each gives by itself."""
    try:
        differ = tried(found)
    except Exception as error:
        raise messages.fixed_rows(found.chunk.source, str(error)) from error
    if differ:
        raise messages.mixed_rows(found.chunk.source)


def tried(found: ExpertCode) -> bool:
    """Whether a region on three experts gives something else than on one and on two of them."""
    draw = torch.Generator().manual_seed(0)
    every = found.arguments(lambda tensor, kind: trial(tensor, kind, draw))
    whole = results(found, every)
    first = results(found, cut_out(every, found.kinds, 0, 1))
    rest = results(found, cut_out(every, found.kinds, 1, 3))
    parts = [torch.cat(pair) for pair in zip(first, rest, strict=True)]
    return any(differs(a, b) for a, b in zip(whole, parts, strict=True))


def trial(tensor: Tensor, kind: str, draw: torch.Generator) -> Tensor:
    """Small weights: a number for each expert, spread over its matrix, whatever the size."""
    if kind == "counts":
        return torch.tensor(TRIAL, dtype=tensor.dtype)
    if kind == "rows":
        made = torch.randn(sum(TRIAL), *map(int, tensor.shape[1:]), generator=draw)
        return made.to(tensor.dtype)
    shape = [len(TRIAL), *(1 for _ in tensor.shape[1:])]
    scale = max(1, int(tensor.shape[-1])) ** -0.5
    spread = torch.randn(shape, generator=draw) * scale
    return spread.to(tensor.dtype).expand(len(TRIAL), *map(int, tensor.shape[1:]))


def cut_out(
    arguments: Sequence[Tensor], kinds: Sequence[str], first: int, last: int
) -> list[Tensor]:
    """Some of the experts, and their rows."""
    rows = slice(sum(TRIAL[:first]), sum(TRIAL[:last]))
    experts = slice(first, last)
    return [a[rows if k == "rows" else experts] for a, k in zip(arguments, kinds, strict=True)]


def results(found: ExpertCode, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(fx.Interpreter(found.chunk.graph).run(*arguments))


def differs(whole: Tensor, parts: Tensor) -> bool:
    if whole.shape != parts.shape:
        return True
    within = TOLERANCE.get(whole.dtype, 5e-2)
    return not torch.allclose(whole.double(), parts.double(), rtol=within, atol=within)
