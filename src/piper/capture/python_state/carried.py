"""Judges a forward that changed Python state: does the next step compute the same?

A captured step runs no Python code. So what a forward changes must not matter to the next forward.
This is proved by tracing again, from the state that the first trace left. If the graph computes the
same, and the state is as before, then so is every later step. Tensors that the first trace left
become new inputs in the second: a table that depends on nothing but constants is recomputed.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from piper.capture import refusals
from piper.capture.marks.runs import path_of
from piper.capture.python_state.code_search import line_that_changes, only_counts
from piper.capture.python_state.graph_equality import Numbering, depends_on_inputs, switches
from piper.capture.python_state.leaves import is_generator
from piper.capture.python_state.places import Place, put
from piper.capture.python_state.reach import Reach
from piper.capture.python_state.snapshot import Change, Snapshot
from piper.capture.torch_private import is_real
from piper.errors import CaptureError

LOG = logging.getLogger("piper")


@dataclass(frozen=True)
class Once:
    """One trace: its graph, whose last outputs are the tensors that it left in `kept`, and the
    marks of random decisions.
    """

    root: fx.GraphModule
    updated: tuple[str, ...]
    before: Snapshot
    after: Snapshot
    kept: Sequence[Place]
    decisions: int = 0

    @property
    def outputs(self) -> list[fx.Node]:
        return list(self.root.graph.output_node().args[0])

    @property
    def results(self) -> list[fx.Node]:
        """The loss and the updated buffers."""
        return self.outputs[: 1 + len(self.updated)]

    @property
    def left(self) -> list[fx.Node]:
        """The nodes of the tensors in `kept`."""
        start = 1 + len(self.updated)
        return self.outputs[start : start + len(self.kept)]

    @property
    def marks(self) -> list[fx.Node]:
        """The numbers that Python decided by."""
        return self.outputs[1 + len(self.updated) + len(self.kept) :]

    def extent(self) -> tuple[int, int]:
        """How many operations are in marked regions, and how many there are in all."""
        nodes = list(self.root.graph.nodes)
        return sum(bool(path_of(node)) for node in nodes), len(nodes)

    @property
    def changes(self) -> list[Change]:
        return list(self.before.differences(self.after))

    def finish(self) -> fx.GraphModule:
        """The graph without the tensors that were left."""
        return self.giving(self.results)

    def giving(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        """The graph with these results."""
        self.root.graph.output_node().args = (tuple(results),)
        self.root.graph.set_codegen(fx.graph.CodeGen())  # it knew the number of results
        self.root.recompile()
        return self.root


def with_new_tensors(once: Once, mode: Any) -> dict[int, Place]:
    """Put a new tensor without values into each place where a trace left one, by id."""
    made: dict[int, Place] = {}
    with mode:
        for place in once.kept:
            value: Tensor = place.value
            new = torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device)
            put(place.container, place.key, new)
            made[id(new)] = Place(place.container, place.key, place.path, place.names, new)
    return made


def same_step(once: Once, again: Once, made: Mapping[int, Place]) -> bool:
    """Whether both traces compute the same loss and the same updates."""
    numbering = Numbering()
    first = numbering.of(once.root)
    known: dict[int, Any] = {}
    for (address, place), node in zip(made.items(), once.left, strict=True):
        known[address] = ("state", place.path) if depends_on_inputs(node) else first[node]
    second = numbering.of(again.root, known)
    return (
        once.updated == again.updated
        and [first[node] for node in once.results] == [second[node] for node in again.results]
        and switches(once.root) == switches(again.root)
    )


def same_results(once: Once, again: Once) -> bool:
    """The same for traces from one state, which leave no tensors for each other."""
    numbering = Numbering()
    first, second = numbering.of(once.root), numbering.of(again.root)
    return [first[node] for node in once.results] == [second[node] for node in again.results]


def written_in_place(once: Once) -> list[Change]:
    """Tensors outside of the graph that were written to."""
    return [
        change
        for change in once.changes
        if change.before is not None
        and change.after is not None
        and isinstance(change.before.value, Tensor)
        and change.before.value is change.after.value
        and is_real(change.before.value)
    ]


def still_changing(once: Once, again: Once, reach: Reach) -> list[Change]:
    """What the second trace changed once more, and some code reads."""
    return changing(once.after, again.after, reach, "forward")


def changing(after: Snapshot, again: Snapshot, reach: Reach, part: str) -> list[Change]:
    """What a second trace changed once more, and some code reads for more than to count."""
    found = [change for change in after.differences(again) if reach.reads(change.place.names)]
    counted = [change for change in found if is_only_counted(change, reach)]
    for change in counted:
        where = line_that_changes(change.place.names[-1], reach.codes)
        LOG.warning(
            "%s: the %s counts in %s, which no code of the model reads: it stays as it is",
            where, part, change.place.path,
        )  # fmt: skip
    return [change for change in found if change not in counted]


def is_only_counted(change: Change, reach: Reach) -> bool:
    names = change.place.names
    counts = isinstance(change.place.value, int | float)
    return (
        counts and bool(names) and _is_named(change.place) and only_counts(names[-1], reach.codes)
    )


def _is_named(place: Place) -> bool:
    """Whether code names this very place: items of lists and dicts have no names."""
    return place.key == "cell_contents" or place.key == place.names[-1]


def buffers_of(view: nn.Module, changes: Sequence[Change]) -> list[str]:
    """The changed attributes that can become buffers: tensors that keep their shape and type."""
    paths = {id(module): path for path, module in view.named_modules()}
    return [
        f"{paths[id(change.place.container)]}.{change.place.key}".lstrip(".")
        for change in changes
        if id(change.place.container) in paths and _can_be_a_buffer(change)
    ]


def _can_be_a_buffer(change: Change) -> bool:
    before = change.before and change.before.value
    after = change.after and change.after.value
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and is_real(before)
        and not isinstance(before, nn.Parameter)
        and not before.requires_grad
        and (before.shape, before.dtype) == (after.shape, after.dtype)
    )


def line_of(change: Change, reach: Reach) -> str:
    """The line of the user's code that makes a change."""
    names = [str(change.place.key), *change.place.names[::-1]]
    return next(filter(None, (line_that_changes(name, reach.codes) for name in names)), "")


def refusal(change: Change, reach: Reach) -> CaptureError:
    """The error about a change that matters to the next step."""
    place, where = change.place, line_of(change, reach)
    value = change.before.value if change.before is not None else None
    if is_generator(value):
        return refusals.drawn_number(where)
    return refusals.changed_state(where, place.path, place.value)
