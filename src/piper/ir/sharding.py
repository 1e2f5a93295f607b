"""How a region is divided over devices, and what a region of experts must look like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from piper.errors import Problem
from piper.ir.model import Bucket, Model, Region
from piper.ir.placement.residency import Residency
from piper.ir.values import Role, TensorSpec
from piper.names import BucketId, Device, RegionId

WHOLE_NUMBERS = ("int64", "int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What `Shard` asks for: the devices of each group compute or hold a region together."""

    groups: tuple[tuple[Device, ...], ...]
    stream: str

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(chain.from_iterable(self.groups))

    @property
    def ways(self) -> int:
        return len(self.groups[0])

    @property
    def holders(self) -> tuple[tuple[Device, ...], ...]:
        """For each share of the region, the devices that hold it."""
        return tuple(tuple(sorted(row)) for row in zip(*self.groups, strict=True))

    def share(self, device: Device) -> int:
        """The index of the share that a device holds."""
        return next(group.index(device) for group in self.groups if device in group)


@dataclass(frozen=True, slots=True)
class Division:
    """How devices divide a region: by tokens, by weights, or by tokens and each part by weights.

    The devices that divide a region together are a team. With two axes, a team is a grid.
    """

    tokens: Sharding | None = None
    weights: Sharding | None = None

    @property
    def axes(self) -> tuple[Sharding, ...]:
        return tuple(axis for axis in (self.tokens, self.weights) if axis is not None)

    @property
    def ways(self) -> int:
        return prod(axis.ways for axis in self.axes)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(chain.from_iterable(self.groups))

    @property
    def groups(self) -> tuple[tuple[Device, ...], ...]:
        """The teams.

        >>> tokens = Sharding(groups=((0, 2), (1, 3)), stream="cp")
        >>> Division(tokens, Sharding(groups=((0, 1), (2, 3)), stream="tp")).groups
        ((0, 1, 2, 3),)
        """
        if len(self.axes) == 1:
            return self.axes[0].groups
        rows = {device: group for group in self.axes[1].groups for device in group}
        teams = (chain.from_iterable(rows.get(d, (d,)) for d in one) for one in self.axes[0].groups)
        return tuple(dict.fromkeys(tuple(sorted(team)) for team in teams))

    def stride(self, axis: int) -> int:
        """How far apart two neighbours along an axis are in their team."""
        first, second = self.axes[axis].groups[0][:2]
        team = next(team for team in self.groups if first in team)
        return team.index(second) - team.index(first)

    @property
    def is_grid(self) -> bool:
        """Whether the groups along one axis are rows of each team, and along the other, columns."""
        if len(self.axes) == 1:
            return True
        if any(len(team) != self.ways for team in self.groups):
            return False
        one, other = self.axes
        return any(
            set(a.groups) == set(self._rows(a.ways)) and set(b.groups) == set(self._columns(a.ways))
            for a, b in ((one, other), (other, one))
        )

    def _rows(self, length: int) -> Iterator[tuple[Device, ...]]:
        return (t[k : k + length] for t in self.groups for k in range(0, len(t), length))

    def _columns(self, length: int) -> Iterator[tuple[Device, ...]]:
        return (team[k::length] for team in self.groups for k in range(length))


@dataclass(frozen=True, slots=True)
class Contract:
    """The inputs of a region of experts: rows sorted by expert, and how many each expert has."""

    experts: int
    counts: int  # position among the inputs
    rows: tuple[int, ...]  # the other inputs
    length: int | None  # number of rows, of all experts together


def contract(model: Model, region: Region) -> Contract | list[Problem]:
    """The inputs of a region of experts, or all reasons why it is not one."""
    specs = [model.values[value].specs[0] for value in region.inputs]
    vectors = [k for k, s in enumerate(specs) if s.dtype in WHOLE_NUMBERS and len(s.shape) == 1]
    rows = tuple(k for k in range(len(specs)) if k not in vectors)
    if len(vectors) != 1 or specs[vectors[0]].shape[0] is None:
        return [no_counts(model, region, specs)]
    experts = specs[vectors[0]].shape[0]
    assert experts is not None
    lengths = [specs[k].shape[0] for k in rows if specs[k].shape]
    found = Contract(experts, vectors[0], rows, lengths[0] if lengths else None)
    problems = [*row_problems(model, region, found), *weight_problems(model, region, experts)]
    return problems or found


def no_counts(model: Model, region: Region, specs: Sequence[TensorSpec]) -> Problem:
    if any(model.values[value].role is Role.RANDOM for value in region.inputs):
        return Problem(
            f"{region.id} uses random numbers (dropout), which would depend on the strategy",
            "move dropout out of the region of experts",
        )
    inputs = ", ".join(f"{v}: {s}" for v, s in zip(region.inputs, specs, strict=True))
    return Problem(
        f"{region.id} does not read exactly one vector of whole numbers, the rows of each expert "
        f"(its inputs are {inputs or 'none'})",
        "count the rows of each expert before the region, as int64[experts], and let the region "
        "read the rows, sorted by expert, and these counts",
    )


def row_problems(model: Model, region: Region, found: Contract) -> Iterator[Problem]:
    """All inputs and outputs but the counts have one row per token, in the same order."""
    inputs = [("input", region.inputs[k]) for k in found.rows]
    if not inputs:
        yield Problem(f"{region.id} reads no rows", "let it read the rows of the tokens")
        return
    for what, value in (*inputs, *(("output", value) for value in region.outputs)):
        spec = model.values[value].specs[0]
        if not spec.shape or spec.shape[0] != found.length:
            yield Problem(
                f"{region.id}: {what} {value} is {spec}, not rows of tokens "
                f"(expected a first dimension of {found.length})",
                "let a region of experts read and write rows, sorted by expert, and nothing else",
            )


def weight_problems(model: Model, region: Region, experts: int) -> Iterator[Problem]:
    for bucket in map(model.buckets.__getitem__, region.buckets):
        yield from bucket_problems(model, region, bucket, experts)


def bucket_problems(
    model: Model, region: Region, bucket: Bucket, experts: int
) -> Iterator[Problem]:
    same = {region.id, region.twin or region.id}
    others = [r.id for r in model.regions
              if bucket.id in r.buckets and r.id not in same and r.twin not in same]  # fmt: skip
    names = ", ".join(parameter.name for parameter in bucket.parameters)
    if bucket.buffers:
        yield Problem(
            f"{region.id} uses the buffer {names}",
            "let experts use parameters only, or compute it inside the region",
        )
    elif others:
        yield Problem(
            f"{region.id} shares the parameter {names} with {others[0]}",
            "give every region of experts parameters of its own",
        )
    for parameter in () if bucket.buffers or others else bucket.parameters:
        if not parameter.spec.shape or parameter.spec.shape[0] != experts:
            yield Problem(
                f"{region.id}: parameter {parameter.name} is {parameter.spec} "
                f"(expected a first dimension of {experts}, the number of experts)",
                "stack the parameters of all experts, and use shared ones outside the region",
            )


Shardings = Mapping[RegionId, Sharding]


def sharding_of(model: Model, shardings: Shardings, bucket: BucketId) -> Sharding | None:
    return shardings.get(model.first_uses[bucket]) if shardings else None


def held_specs(model: Model, shardings: Shardings, bucket: BucketId) -> tuple[TensorSpec, ...]:
    """What a device holds of a bucket before ZeRO: all of it, or its share of the experts."""
    specs, how = model.held(bucket), sharding_of(model, shardings, bucket)
    return specs if how is None else tuple(share_of(spec, how.ways) for spec in specs)


def share_of(spec: TensorSpec, ways: int) -> TensorSpec:
    """
    >>> print(share_of(TensorSpec((8, 3)), 2))
    float32[4, 3]
    """
    return replace(spec, shape=((spec.shape[0] or 0) // ways, *spec.shape[1:]))


def among_holders(how: Residency, sharding: Sharding) -> Residency:
    """The same within devices that hold the same experts: only they shard and reduce together."""
    groups = tuple(chain.from_iterable(within(how, sharding)))
    return replace(how, groups=groups, shares=sharding.ways)


def within(how: Residency, sharding: Sharding) -> list[list[tuple[Device, ...]]]:
    """For each share of the experts, the part of each group that holds it.

    Without ZeRO, groups do not matter: all holders of a share form one.
    """
    if not how.zero:
        return [[holders] for holders in sharding.holders]
    share = {device: k for group in sharding.groups for k, device in enumerate(group)}
    found: list[list[tuple[Device, ...]]] = [[] for _ in range(sharding.ways)]
    for group in how.groups:
        cut: dict[int, list[Device]] = {}
        for device in group:
            cut.setdefault(share[device], []).append(device)
        for k, devices in cut.items():
            found[k].append(tuple(devices))
    return found
