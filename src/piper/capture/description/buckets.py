"""Buckets: parameters that the same regions use and train. They live and move together."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from piper.capture.description.region_graphs import Lowered
from piper.capture.fx_nodes import value
from piper.capture.graphs.phases import Layout
from piper.capture.precision import Precision
from piper.capture.trace.arguments.inputs import spec_of
from piper.capture.trace.forward import Traced
from piper.ir.model import Bucket, Parameter
from piper.ir.placement.placements import Invariant, Placement
from piper.names import BucketId, RegionId

Part = tuple[tuple[BucketId, ...], Layout]


@dataclass
class Bucketed:
    """All buckets. For each region: which buckets it uses, and where its weights are in them."""

    buckets: dict[BucketId, Bucket]
    parts: list[Part]
    unused: tuple[str, ...]  # names of parameters and buffers that no region uses


@dataclass(frozen=True)
class _Key:
    users: tuple[int, ...]
    trainable: bool  # some region gives it a gradient
    buffer: bool
    gradient: str | None  # the type of the sum of its gradients; None: its own, or no sum
    # Pieces, and parts of gradients, are kept apart: by tokens, if by both, and by weights.
    kinds: tuple[type[Placement], ...] = (Invariant, Invariant)


def make_buckets(
    traced: Traced,
    regions: Sequence[Lowered],
    ids: Sequence[RegionId],
    trained: Collection[str] | None = None,
) -> Bucketed:
    """`trained` are the parameters that training updates; None: those that get a gradient here."""
    names = {node: name for name, node in traced.weights.items()}
    users = _users(regions)
    if trained is not None:
        users = {n: dict.fromkeys(uses, names[n] in trained) for n, uses in users.items()}
    keys = {node: _key(traced, name, users[node]) for node, name in names.items() if node in users}
    members: dict[_Key, list[fx.Node]] = {}
    for node, key in keys.items():
        members.setdefault(key, []).append(node)
    buckets: dict[BucketId, Bucket] = {}
    usual = traced.precision.reduce if traced.precision else None
    parts = []
    for lowered in regions:
        order = list(dict.fromkeys(keys[node] for node in lowered.chunk.weights))
        for key in order:
            parameters = _parameters(traced, members[key], names)
            bucket = _bucket(key, _id(key, ids, usual), parameters, traced.precision)
            buckets.setdefault(bucket.id, bucket)
        layout = _layout(lowered, order, members)
        parts.append((tuple(_id(key, ids, usual) for key in order), layout))
    unused = tuple(name for node, name in names.items() if node not in users)
    return Bucketed(buckets, parts, unused)


def _users(regions: Sequence[Lowered]) -> dict[fx.Node, dict[int, bool]]:
    """The regions that use each weight, and whether they give it a gradient."""
    users: dict[fx.Node, dict[int, bool]] = {}
    for number, lowered in enumerate(regions):
        for node, gradient in zip(lowered.chunk.weights, lowered.joint.gradients, strict=False):
            users.setdefault(node, {})[number] = gradient is not None
    return users


def _key(traced: Traced, name: str, users: Mapping[int, bool]) -> _Key:
    trainable = any(users.values())
    return _Key(
        tuple(users),
        trainable,
        name not in traced.parameters,
        traced.gradients.get(name) if trainable else None,
        (_kind(traced.by_tokens, name), _kind(traced.placements, name)),
    )


def _kind(placements: Mapping[str, Placement], name: str) -> type[Placement]:
    return type(placements.get(name, Invariant()))


def _id(key: _Key, ids: Sequence[RegionId], usual: str | None) -> BucketId:
    """`usual`: the type of most sums of gradients. Buckets of others say theirs."""
    name = "+".join(ids[number] for number in key.users)
    if key.gradient not in (None, usual):
        name = f"{name}:{key.gradient}"
    for kind in key.kinds:
        if kind is not Invariant:
            name = f"{name}:{kind.__name__.lower()}"
    if key.buffer:
        return BucketId(f"{name}:buffers")
    return BucketId(name if key.trainable else f"{name}:frozen")


def _parameters(
    traced: Traced, nodes: list[fx.Node], names: dict[fx.Node, str]
) -> tuple[Parameter, ...]:
    """With the shapes of whole parameters, even if a device holds a piece."""
    return tuple(
        Parameter(
            name,
            traced.whole.get(name, spec_of(value(node))),
            traced.placements.get(name, Invariant()),
            traced.by_tokens.get(name, Invariant()),
        )
        for node, name in ((node, names[node]) for node in nodes)
    )


def _bucket(
    key: _Key,
    name: BucketId,
    parameters: tuple[Parameter, ...],
    precision: Precision | None,
) -> Bucket:
    bucket = Bucket(name, parameters, trainable=key.trainable, buffers=key.buffer)
    if precision is None or not key.trainable:
        return bucket
    return replace(bucket, master=precision.master, gradient=key.gradient)


def _layout(lowered: Lowered, order: list[_Key], members: dict[_Key, list[fx.Node]]) -> Layout:
    position = {node: index for index, node in enumerate(lowered.chunk.weights)}
    groups = tuple(tuple(position[node] for node in members[key]) for key in order)
    trainable = tuple(key.trainable for key in order)
    return Layout(groups, trainable, tuple(key.gradient for key in order))
