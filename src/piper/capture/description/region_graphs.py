"""Every region's joint graph and its partitions. Equal regions are lowered once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import fx

from piper.capture import refusals, tensor_refusals
from piper.capture.cache.derivatives import Derivatives, derivatives
from piper.capture.fx_nodes import line, value
from piper.capture.graphs.fingerprint import fingerprint
from piper.capture.graphs.joint import Joint, differentiable, differentiate
from piper.capture.graphs.partition import Partition, partition
from piper.capture.graphs.remat_policies import nodes_to_keep
from piper.capture.regions.cut import Chunk
from piper.capture.torch_private import HIDDEN_UPDATE, VALUE_WANTED
from piper.capture.trace.forward import Traced
from piper.capture.tracing_private import UNSUPPORTED
from piper.capture.unvalued_errors import is_about_numbers
from piper.ir.remat_policy import RematPolicy

Flags = tuple[bool, ...]


@dataclass
class Lowered:
    """A region with its derivative. Regions with the same joint graph have the same `key`."""

    chunk: Chunk
    key: tuple
    joint: Joint
    cut: Partition
    updates: dict[int, int]  # argument that is a buffer -> result that is its new value
    given: Flags  # whether each output gets a gradient
    keep: frozenset[str] | None = None  # nodes that a backward that recomputes does not repeat

    def recomputing(self, policy: RematPolicy) -> Lowered:
        """The same region with a backward that recomputes the forward."""
        keep = nodes_to_keep(self.joint, self.cut, policy)
        volatile = [self.joint.arguments[position] for position in self.updates]
        cut = partition(self.joint, len(self.chunk.weights), volatile, keep)
        kept = [node.name for node in cut.saved if node.name in keep]
        return replace(self, key=(*self.key, "recomputes", *kept), cut=cut, keep=keep)


def lower(traced: Traced, chunks: Sequence[Chunk], forward_only: bool = False) -> list[Lowered]:
    """Lower all regions.

    First, in program order: which activations depend on parameters. Then, in reverse: which of them
    get a gradient. An output that needs no gradient is treated as detached.
    """
    lowering = _Lowering(traced)
    if forward_only:
        return lowering.without_gradients(chunks)
    wants = [lowering.forward(chunk) for chunk in chunks]
    if not lowering.wanted.get(traced.results[0]):
        raise refusals.loss_without_parameters(line(traced.results[0]))
    lowered = [
        lowering.backward(chunk, flags)
        for chunk, flags in zip(reversed(chunks), reversed(wants), strict=True)
    ]
    return lowered[::-1]


@contextmanager
def _explained(chunk: Chunk) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, VALUE_WANTED) or is_about_numbers(error):
            raise refusals.value_wanted_in_region(chunk.source) from error
        if isinstance(error, UNSUPPORTED):
            raise refusals.no_kernel(chunk.source, str(error)) from error
        if HIDDEN_UPDATE in str(error):
            raise refusals.hidden_update(chunk.source) from error
        if isinstance(error, ZeroDivisionError):
            raise tensor_refusals.mean_of_nothing(chunk.source) from error
        error.add_note(f"raised in the region that begins at {chunk.source}")
        raise


@dataclass
class _Lowering:
    traced: Traced
    wanted: dict[fx.Node, bool] = field(init=False)  # whether this value requires a gradient
    given: set[fx.Node] = field(init=False)  # values that get one
    names: dict[int, str] = field(default_factory=dict)
    known_flags: dict[tuple, Flags] = field(default_factory=dict)
    known_graphs: dict[tuple, tuple[Joint, Partition]] = field(default_factory=dict)
    derivatives: Derivatives = field(init=False)

    def __post_init__(self) -> None:
        self.derivatives = derivatives(self.traced.mode, self.traced.device)
        weights = self.traced.weights
        self.wanted = {weights[name]: want for name, want in self.traced.parameters.items()}
        self.given = {self.traced.results[0]}

    def without_gradients(self, chunks: Sequence[Chunk]) -> list[Lowered]:
        """No parameter wants a gradient, and no output gets one."""
        self.wanted, self.given = {}, set()
        for chunk in chunks:
            self.names[id(chunk)] = fingerprint(chunk.graph)
        return [self.backward(chunk, (False,) * len(chunk.arguments)) for chunk in chunks]

    def forward(self, chunk: Chunk) -> Flags:
        wants = tuple(self.wanted.get(node, False) for node in chunk.arguments)
        name = self.names[id(chunk)] = fingerprint(chunk.graph)
        if (name, wants) not in self.known_flags:
            with _explained(chunk):
                make = partial(differentiable, chunk, self.traced.mode, wants)
                self.known_flags[name, wants] = self.derivatives.flags(
                    chunk.graph, name, wants, make
                )
        self.wanted.update(zip(chunk.results, self.known_flags[name, wants], strict=True))
        return wants

    def backward(self, chunk: Chunk, wants: Flags) -> Lowered:
        given = tuple(node in self.given for node in chunk.outputs)
        if not any(given):
            wants = (False,) * len(wants)
        updates = {
            chunk.arguments.index(buffer): chunk.results.index(new)
            for buffer, new in chunk.updates.items()
        }
        weights = len(chunk.weights)
        key = (self.names[id(chunk)], wants, given, weights, tuple(updates.items()))
        if key not in self.known_graphs:
            flags = (*given, *(False for _ in updates))
            with _explained(chunk):
                make = partial(differentiate, chunk, self.traced.mode, wants, flags)
                joint = self.derivatives.joint(chunk.graph, key[0], (wants, flags), make)
            self.traced.check(joint.module)  # for what backwards of the user read
            volatile = [joint.arguments[position] for position in updates]
            self.known_graphs[key] = joint, partition(joint, weights, volatile)
        joint, cut = self.known_graphs[key]
        for node, gradient in zip(chunk.arguments, joint.gradients, strict=True):
            if gradient is not None:
                self.require_dense(node, gradient)
                self.given.add(node)
        return Lowered(chunk, key, joint, cut, updates, given)

    def require_dense(self, node: fx.Node, gradient: fx.Node) -> None:
        if value(gradient).layout is not torch.strided:
            names = {weight: name for name, weight in self.traced.weights.items()}
            raise refusals.sparse_gradient(names.get(node, node.name))
