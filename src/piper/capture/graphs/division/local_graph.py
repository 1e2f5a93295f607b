"""The graph that every device runs: local shapes, with conversions between its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from piper.capture import refusals
from piper.capture.fx_nodes import line, value
from piper.capture.graphs.division import expert_rows
from piper.capture.graphs.division.calls import Emitter, Option, operands
from piper.capture.graphs.division.layouts import as_traced
from piper.capture.graphs.division.levels import Form, hosts_of, is_message, levels_of
from piper.capture.graphs.division.notes import notes_of
from piper.capture.graphs.division.pieces import own_piece, pack, unpack
from piper.capture.graphs.division.refusals import values_in_division
from piper.capture.graphs.division.rules import localized
from piper.capture.graphs.division.search.conversions import Read
from piper.capture.graphs.division.search.plan import Plan
from piper.capture.graphs.division.search.space import Space
from piper.capture.kernels.conversion import CONVERT
from piper.capture.marks.annotate import KEY
from piper.capture.marks.runs import PIECE, REQUESTS, Piece, Run
from piper.capture.torch_private import VALUE_WANTED, graph_module
from piper.capture.trace.forward import Traced
from piper.capture.trace.grad_modes import Mode, Switch, autocast, modes_of
from piper.ir.placement.placements import (
    Constant,
    Conversion,
    Cut,
    Invariant,
    Placement,
    Replicated,
    Returned,
    Shifted,
    local_shape,
)

aten = torch.ops.aten
WHOLE = Invariant, Replicated, Constant


def local_graph(traced: Traced, space: Space, plan: Plan, runs: list[Run]) -> Traced:
    """The traced graph as one of the devices runs it."""
    writer = _Writer(traced, space, plan, runs)
    with traced.mode:
        writer.placeholders()
        for number, run in enumerate(runs):
            writer.run(number, run)
        writer.finish()
    names = {name: plan.held[node] for name, node in traced.weights.items() if node in plan.held}
    return replace(
        traced,
        root=graph_module(traced.root, writer.graph),
        random=writer.copies.get(traced.random),
        rank=writer.team_rank,
        placements=names,
        by_tokens=traced.placements,
        whole={
            name: space.whole(traced.weights[name])
            for name, placement in names.items()
            if isinstance(placement, Cut)
        },
    )


@dataclass
class _Writer:
    traced: Traced
    space: Space
    plan: Plan
    runs: list[Run]
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node | None, fx.Node] = field(default_factory=dict)
    forms: dict[Form, fx.Node] = field(default_factory=dict)
    received: dict[Form, fx.Node] = field(default_factory=dict)  # by messages, as they came
    counts: dict[fx.Node, fx.Node] = field(default_factory=dict)  # of a device's rows per expert
    numbers: int = 0  # of pieces so far

    def __post_init__(self) -> None:
        self.modes = modes_of(self.traced.root.graph)
        self.switch = Switch(self.graph)
        self.levels = levels_of(self.space, self.plan)
        self.run_of = {node: k for k, run in enumerate(self.runs) for node in run.nodes}
        self.notes = notes_of(self.space, self.plan)
        hosts = hosts_of(self.space, self.plan, self.run_of)
        self.hosted: dict[tuple[int, int], list[Read]] = {}
        self.made = {(read.value, read.target): read for read in self.plan.reads}
        for read in self.plan.reads:
            if is_message(read):
                level = self.levels.forms[read.value, read.source]
                self.hosted.setdefault((hosts[read], level), []).append(read)

    def placeholders(self) -> None:
        for node in self.traced.placeholders:
            copy = self.copies[node] = self.graph.placeholder(node.name)
            copy.meta = dict(node.meta)
            if node in self.plan.held:
                self.forms[node, self.plan.held[node]] = copy
                copy.meta["val"] = self._held(node)
        if self.traced.rank is None:
            self.team_rank = self.graph.placeholder("rank")
            device = self.traced.device
            self.team_rank.meta["val"] = torch.empty((), dtype=torch.int64, device=device)
        else:
            self.team_rank = self.copies[self.traced.rank]
        self.rank = self._rank()

    def _rank(self) -> fx.Node:
        """Where a device is along this axis. The rank is that in the whole team."""
        request = next(iter(self.space.requests.values()))
        if request.axis.team is None:
            return self.team_rank
        emit = Emitter(self.graph, {PIECE: Piece(0, ())}, self.team_rank)  # no region of its own
        if request.axis.stride > 1:
            return emit(aten.floor_divide.Scalar, self.team_rank, request.axis.stride)
        return emit(aten.remainder.Scalar, self.team_rank, request.ways)

    def _held(self, parameter: fx.Node) -> torch.Tensor:
        whole, placement = value(parameter), self.plan.held[parameter]
        shape = local_shape(tuple(whole.shape), placement, self.space.ways_of(parameter))
        return torch.empty(shape, dtype=whole.dtype, device=whole.device)

    def run(self, number: int, run: Run) -> None:
        """The nodes of a run, level by level, and behind each level the messages that it sends."""
        free = [node for node in run.nodes if node not in self.levels.nodes]
        axes = self._axes(run)
        if any(map(self.space.is_expert, run.nodes)):
            self._count_rows(run)
            axes = ()  # each device has rows of its own
        by_level: dict[int, list[fx.Node]] = {}
        for node in run.nodes:
            if node in self.levels.nodes:
                by_level.setdefault(self.levels.nodes[node], []).append(node)
        levels = sorted({*by_level, *(level for host, level in self.hosted if host == number)})
        piece = self._piece(axes)
        for node in free:
            with self._at(node, run, piece):
                self.copies[node] = self._copied(node, self.copies.__getitem__)
        for level in levels or [0]:
            piece = self._piece(axes)
            for node in by_level.get(level, ()):
                if node.target is CONVERT:  # of another axis
                    self._read(node, run, piece)
                    self._write(node, run, self._renumbered(run, axes))
                    piece = self._piece(axes)
                else:
                    self._write(node, run, piece)
            packed = [
                (read, self._packed(read, run, piece))
                for read in self.hosted.get((number, level), ())
            ]
            for read, node in packed:
                self._message(read, node, run, axes)

    def _axes(self, run: Run) -> tuple[int, ...]:
        """Over how many devices a run is divided, along the axes so far and this one."""
        ways = self.space.ways_in(run.nodes)
        return (*(run.piece.axes if run.piece else ()), ways) if ways > 1 else ()

    def _piece(self, axes: tuple[int, ...]) -> Piece | None:
        if not axes:
            return None
        self.numbers += 1
        return Piece(self.numbers, axes)

    def _renumbered(self, run: Run, axes: tuple[int, ...]) -> Piece:
        """The piece of a conversion that an earlier division made."""
        assert run.piece is not None
        self.numbers += 1
        return replace(run.piece, number=self.numbers, axes=axes)

    def _read(self, node: fx.Node, run: Run, piece: Piece | None) -> None:
        """Make what a node reads, in a piece before it."""
        with self._at(node, run, piece):
            for need, placement in zip(operands(node), self.plan.options[node].inputs, strict=True):
                self._form(need, placement)

    @contextmanager
    def _at(self, like: fx.Node, run: Run, piece: Piece | None) -> Iterator[None]:
        """New nodes are marked as these, and run in the mode of `like`."""
        custom = {**like.meta.get("custom", {}), KEY: run.path}
        meta = {**like.meta, "custom": custom, PIECE: piece}
        meta[REQUESTS] = run.nodes[0].meta.get(REQUESTS, {})
        mode = self.modes.get(like, Mode())
        self.switch.to(mode)
        self.emit = Emitter(self.graph, meta, self.rank)
        with autocast(mode):
            yield

    def _write(self, node: fx.Node, run: Run, piece: Piece | None) -> None:
        option = self.plan.options[node]
        with self._at(node, run, piece):
            if node not in self.space.requests:
                made = self._copied(node, lambda need: self._argument(node, need, Invariant()))
            elif self.space.is_expert(node):
                made = self._write_expert(node, option)
            else:
                reads = dict(zip(operands(node), option.inputs, strict=True))
                every = {need: self._argument(node, need, read) for need, read in reads.items()}
                made = self._localized(node, option, every)
        self.forms[node, option.output] = made

    def _localized(self, node: fx.Node, option: Option, every: Mapping[fx.Node, Any]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), every.__getitem__)
        try:
            return localized(self.space.call(node), option, self.emit, args, kwargs)
        except VALUE_WANTED:  # as `istft` looks at its window
            if any(not isinstance(one, WHOLE) for one in (*option.inputs, option.output)):
                raise values_in_division(line(node)) from None
            return self._copied(node, every.__getitem__)

    def _count_rows(self, run: Run) -> None:
        """How many rows of each expert this device takes: a region of its own, before theirs."""
        ways = self.space.ways_in(run.nodes)
        for counts in dict.fromkeys(expert_rows.counts_of(self.space, run.nodes)):
            home = self.runs[self.run_of[counts]]
            with self._at(counts, home, self._piece(self._axes(home))):
                rows = expert_rows.rows_of(self.space, run.nodes) // ways
                whole = self._form(counts, Invariant())
                self.counts[counts] = expert_rows.own_counts(self.emit, whole, rows)

    def _write_expert(self, node: fx.Node, option: Option) -> fx.Node:
        """As it is, on the rows of this device."""
        reads = zip(operands(node), option.inputs, strict=True)
        every = {
            need: self.counts[need] if need in self.counts else self._form(need, placement)
            for need, placement in reads
        }
        args, kwargs = fx.map_arg((node.args, node.kwargs), every.__getitem__)
        try:
            return self.emit(node.target, *args, **kwargs)
        except Exception as error:
            raise refusals.fixed_rows(line(node), str(error)) from error

    def _argument(self, node: fx.Node, need: fx.Node, placement: Placement) -> fx.Node:
        return as_traced(self.emit, node, need, self._form(need, placement))

    def _copied(self, node: fx.Node, argument: Any) -> fx.Node:
        copy = self.graph.node_copy(node, argument)
        copy.meta = dict(self.emit.meta)
        return copy

    def _form(self, node: fx.Node, placement: Placement) -> fx.Node:
        """A value as it is read here. What needs no message is made here, too."""
        form = node, placement
        if form not in self.forms:
            mode = self.switch.mode
            self.switch.to(replace(mode, grad=True))  # it may be read again, with gradients
            self.forms[form] = self._converted(form)
            self.switch.to(mode)
        return self.forms[form]

    def _converted(self, form: Form) -> fx.Node:
        node, target = form
        if node in self.space.free:
            whole = self.copies[node]
            return self._own(whole, node, target) if isinstance(target, Cut) else whole
        if node in self.plan.held:  # a piece of a parameter that is held whole
            return self._own(self.copies[node], node, target)
        read = self.made[form]
        if not is_message(read):
            whole = self._form(node, read.source)
            return self._own(whole, node, target) if isinstance(target, Cut) else whole
        came = self.received[form]
        if isinstance(read.source, Cut) and not isinstance(read.target, Shifted | Returned):
            return unpack(self.emit, came, read.source, self._ways(node))
        return came

    def _own(self, whole: fx.Node, node: fx.Node, target: Placement) -> fx.Node:
        assert isinstance(target, Cut)
        return own_piece(self.emit, whole, target, self._ways(node))

    def _ways(self, node: fx.Node) -> int:
        return self.space.ways_of(node)

    def _packed(self, read: Read, run: Run, piece: Piece | None) -> fx.Node:
        """What is sent: pieces for other devices lie one after the other."""
        with self._at(read.value, run, piece):
            whole = self._form(read.value, read.source)
            if isinstance(read.target, Cut):
                return pack(self.emit, whole, read.target, self._ways(read.value))
            return whole

    def _message(self, read: Read, node: fx.Node, run: Run, axes: tuple[int, ...]) -> None:
        conversion = Conversion(read.source, read.target)
        self.numbers += 1
        note = self.notes[read.value, read.target]
        piece = Piece(self.numbers, axes, conversion, len(axes) - 1, note)
        with self._at(read.value, run, piece):
            steps = str(conversion.forward), str(conversion.backward)
            self.received[read.value, read.target] = self.emit(CONVERT, node, *steps, axes[-1])

    def finish(self) -> None:
        self.switch.to(Mode())
        results = [self._form(node, Invariant()) for node in self.traced.results]
        self.graph.output(tuple(results))
        self.graph.lint()
