"""Graphs of expert regions for a share of the experts and any number of rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture import refusals, torch_private
from piper.capture.description.expert_sizes import candidates
from piper.capture.description.region_graphs import Lowered
from piper.capture.fx_nodes import value
from piper.capture.graphs.joint import differentiate
from piper.capture.graphs.partition import partition
from piper.capture.graphs.phases import Layout, phase_graphs
from piper.capture.regions.cut import Chunk
from piper.errors import CaptureError
from piper.ir.sharding import Contract
from piper.names import Phase

Graphs = dict[Phase, fx.GraphModule]
TRIAL = (2, 0, 1)  # rows of each expert in a trial run
DRAWS = 3
CROWD = 8  # devices whose rows all go to one expert in a trial run
CROWD_BYTES = 2**24  # limit for the rows of a trial run
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # other dtypes: 5e-2
TENSOR_CORES = 2e-3  # for float32, if PyTorch is allowed to use TF32


@dataclass(frozen=True)
class ExpertCode:
    """What it takes to make the graphs of an expert region again, for other sizes."""

    lowered: Lowered
    layout: Layout
    contract: Contract
    mode: Any

    @property
    def chunk(self) -> Chunk:
        return self.lowered.chunk

    @property
    def kinds(self) -> list[str]:
        """The kind of each argument."""
        weights = len(self.chunk.weights)
        kinds = ["weights"] * weights + ["rows"] * len(self.chunk.inputs)
        kinds[weights + self.contract.counts] = "counts"
        return kinds

    def arguments(self, make: Callable[[Tensor, str], Tensor]) -> list[Tensor]:
        """One tensor for each argument. `make` gets its kind: weight, rows or counts."""
        nodes = self.chunk.graph.graph.find_nodes(op="placeholder")
        return [make(value(node), kind) for node, kind in zip(nodes, self.kinds, strict=True)]

    def candidates(self) -> Iterator[ExpertCode]:
        """This code, and what it may mean for other numbers of rows and experts."""
        nodes = self.chunk.graph.graph.find_nodes(op="placeholder")
        by_kind = dict(zip(reversed(self.kinds), reversed(nodes), strict=True))
        for graph in candidates(self.chunk.graph, by_kind["counts"], by_kind.get("rows")):
            chunk = copy.copy(self.chunk)
            chunk.graph = graph
            yield replace(self, lowered=replace(self.lowered, chunk=chunk))


@dataclass
class ExpertGraphs:
    """The graphs of shares of experts, made on first use."""

    codes: dict[str, ExpertCode]
    made: dict[tuple[str, int], Graphs] = field(default_factory=dict)
    proven: set[str] = field(default_factory=set)

    def get(self, code: str, ways: int) -> Graphs:
        if (code, ways) not in self.made:
            self.made[code, ways] = share(self.codes[code], ways)
        return self.made[code, ways]

    def vary(self, code: str, other: str, lowered: Lowered) -> None:
        """If the region of this code can be divided, so can it with another cut."""
        if code in self.codes and other not in self.codes:
            self.codes[other] = replace(self.codes[code], lowered=lowered)

    def prove(self, code: str, ways: int) -> None:
        """An error if experts or rows depend on each other, or if the region cannot be divided."""
        if code not in self.proven:
            self.codes[code] = divisible(self.codes[code])
            self.proven.add(code)
        self.get(code, ways)


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
        raise refusals.fixed_rows(chunk.source, str(error)) from error
    cut = partition(joint, len(chunk.weights), (), lowered.keep)
    same = ("backward_arguments", "weight_arguments", "weight_tangents")
    if any(getattr(cut, name) != getattr(lowered.cut, name) for name in same):
        raise refusals.fixed_rows(chunk.source, "its backward reads other inputs then")
    return dict(phase_graphs(joint, cut, found.layout, {}))


def divisible(found: ExpertCode) -> ExpertCode:
    """The code as it is, or with sizes that follow its arguments, as its trial shows.

    An error if experts or rows depend on each other.
    """
    errors: list[CaptureError] = []
    for candidate in found.candidates():
        try:
            refuse_mixing(candidate)
            return candidate
        except CaptureError as error:
            errors.append(error)
    ran = (one for one in errors if one.__cause__ is None)  # its sizes fit, its numbers do not
    raise next(ran, errors[0])


def refuse_mixing(found: ExpertCode) -> None:
    """Run it on a few rows. Each result must be the same as if the row were alone."""
    try:
        for draw in range(DRAWS):
            Trial(found, draw).run()
    except CaptureError:
        raise
    except Exception as error:
        raise refusals.fixed_rows(found.chunk.source, str(error)) from error


@dataclass
class Trial:
    """A few rows for three experts, one of which gets none. Weights are small."""

    found: ExpertCode
    number: int

    def __post_init__(self) -> None:
        self.draw = torch.Generator().manual_seed(self.number)
        self.source = self.found.chunk.source
        self.arguments = self.found.arguments(self.argument)
        self.expert = [e for e, count in enumerate(TRIAL) for _ in range(count)]

    def argument(self, tensor: Tensor, kind: str) -> Tensor:
        inner = tuple(map(int, tensor.shape[1:]))
        if kind == "counts":
            return torch.tensor(TRIAL, dtype=tensor.dtype, device=tensor.device)
        if kind == "rows":
            made = torch.rand(sum(TRIAL), *inner, generator=self.draw) + 0.1
            return (made * (1 if tensor.is_floating_point() else 9)).to(tensor.device, tensor.dtype)
        scale = max(1, inner[-1] if inner else 1) ** -0.5
        made = torch.randn(len(TRIAL), *inner, generator=self.draw) * scale
        return made.to(tensor.device, tensor.dtype)

    def run(self) -> None:
        whole = self.results(self.arguments)
        for row, expert in enumerate(self.expert):
            self.refuse_other([result[row] for result in whole], self.alone(row, expert))
        row = self.number % len(self.expert)  # one row per draw: a crowd takes seconds
        for others in (self.in_a_crowd, self.among_all_experts):
            found = others(row, self.expert[row])
            self.refuse_other([result[row] for result in whole], found)
        self.refuse_gradients()

    def results(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        found = list(fx.Interpreter(self.found.chunk.graph).run(*arguments))
        rows = arguments[self.found.kinds.index("rows")]
        if any(result.shape[:1] != rows.shape[:1] for result in found):
            raise refusals.no_rows(self.source)
        return found

    def chosen(
        self, rows: list[int], experts: slice | list[int], counts: list[int]
    ) -> list[Tensor]:
        """Some rows (or copies of one row) for some of the experts."""
        kinds = zip(self.arguments, self.found.kinds, strict=True)
        return [
            a.new_tensor(counts) if kind == "counts"
            else a[rows] if kind == "rows" else a[experts]
            for a, kind in kinds
        ]  # fmt: skip

    def alone(self, row: int, expert: int) -> list[Tensor]:
        """One row with only its own expert."""
        with torch.no_grad():
            given = self.chosen([row], slice(expert, expert + 1), [1])
            return [result[0] for result in self.results(given)]

    def in_a_crowd(self, row: int, expert: int) -> list[Tensor]:
        """The last of as many rows as one expert may ever get, within the limit of memory."""
        every = [a for a, k in zip(self.arguments, self.found.kinds, strict=True) if k == "rows"]
        width = max(1, sum(a[:1].numel() * a.element_size() for a in every))
        many = max(2, min(CROWD * (self.found.contract.length or 0), CROWD_BYTES // width))
        counts = [many if e == expert else 0 for e in range(len(TRIAL))]
        with torch.no_grad():
            given = self.chosen([row] * many, slice(None), counts)
            return [result[-1] for result in self.results(given)]

    def among_all_experts(self, row: int, expert: int) -> list[Tensor]:
        """One row for the last of as many experts as the region has, within the limit."""
        kinds = list(zip(self.arguments, self.found.kinds, strict=True))
        size = sum(a[:1].numel() * a.element_size() for a, kind in kinds if kind == "weights")
        many = max(1, min(self.found.contract.experts, CROWD_BYTES // max(1, size)))
        counts = [0] * (many - 1) + [1]
        with torch.no_grad():
            given = self.chosen([row], [expert] * many, counts)
            return [result[0] for result in self.results(given)]

    def refuse_other(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
        for a, b in zip(one, other, strict=True):
            left, right = a.detach().double(), b.detach().double()
            if not left.numel():
                continue
            within = tolerance(a) * max(1e-30, float(left.abs().max()))
            if not torch.allclose(left, right, rtol=0, atol=within, equal_nan=True):
                raise refusals.mixed_rows(self.source)

    def refuse_gradients(self) -> None:
        """The gradient of one row must be exactly zero for other rows and other experts."""
        given = [a.requires_grad_(a.is_floating_point()) for a in self.arguments]
        whole = [r for r in self.results(given) if r.requires_grad]
        leaves = [(a, k) for a, k in zip(given, self.found.kinds, strict=True) if a.requires_grad]
        for row, expert in enumerate(self.expert):
            roots = [result[row].sum() for result in whole]
            if not roots:
                return
            grads = torch.autograd.grad(
                roots, [a for a, _ in leaves], retain_graph=True, allow_unused=True
            )
            for grad, (_, kind) in zip(grads, leaves, strict=True):
                own = row if kind == "rows" else expert
                if grad is not None and self.leaks(grad, own):
                    raise refusals.mixed_rows(self.source)

    def leaks(self, grad: Tensor, own: int) -> bool:
        rest = [part for k, part in enumerate(grad) if k != own]
        return any(bool((part != 0).any()) for part in rest)


def tolerance(result: Tensor) -> float:
    """How much a sum may differ in another order."""
    if result.is_cuda and result.dtype == torch.float32:
        return TENSOR_CORES
    return TOLERANCE.get(result.dtype, 5e-2)
