"""What one device needs of a compiled job: its plan, parameters, regions and communicators.

Devices of one role need the same, but for whom they meet: each device makes its own assignment from
the part of its role and what is common to the job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from piper.capture import Captured
from piper.capture.kernels.callables import RegionCode
from piper.capture.loss import LossForm, form_from_json, form_to_json
from piper.ir.by_device.roles import Roles
from piper.ir.dag import Dag
from piper.ir.model import Bucket
from piper.job.compile.compiler import Compiled
from piper.names import BucketId, Device, Phase, RegionId, ValueId
from piper.plan.analyse.required_communicators import (
    RequiredCommunicators,
    RoleMeetings,
    required_communicators,
    role_meetings,
    state_turns,
)
from piper.plan.binding import JobGroups, RolePlan, bind
from piper.plan.inputs import input_buffers
from piper.plan.instructions import Instruction, Keep, Load, Plan, Run, Shape
from piper.plan.serialization import field_values, frozen
from piper.plan.serialization import from_json as plan_from_json
from piper.plan.serialization import to_json as plan_to_json
from piper.runtime.state.device_state import Named

Tensors = tuple[tuple[Shape, ...], bool]  # the tensors of a buffer, and whether it is a bundle


@dataclass(frozen=True, slots=True)
class CommonPart:
    """What is the same for all devices of a job."""

    groups: JobGroups
    met: RoleMeetings
    loss: str  # dtype of the loss
    form: LossForm  # how losses of microbatches become one
    whole: frozenset[int]  # inputs that microbatches share
    statistics: Mapping[str, Device]  # buffers that replicas update: where the first of these is
    asked: str  # the line that asks for the layout of the batch


@dataclass(frozen=True, slots=True)
class RolePart:
    """What is the same for all devices of a role."""

    role: RolePlan
    contents: Mapping[str, tuple[Named, ...]]  # the parameters of each local bucket
    trainable: Mapping[str, bool]  # of each such bucket
    regions: Mapping[str, RegionCode]  # the code of each local region
    experts: tuple[str, ...]  # regions that look like regions of experts
    values: Mapping[str, Tensors]  # what kernels read and write, if known in advance

    @property
    def runs(self) -> list[tuple[str, Phase]]:
        """The regions and phases that these devices run, each once."""
        runs = (one for one in self.role.plan.instructions if isinstance(one, Run))
        return list(dict.fromkeys((run.region, Phase(run.phase)) for run in runs))


@dataclass(frozen=True, slots=True)
class Assignment:
    """One device's part."""

    plan: Plan
    needs: RequiredCommunicators
    turns: Mapping[str, tuple[int, int]]  # of each state at home: its place among its holders
    common: CommonPart
    part: RolePart

    @property
    def reported_states(self) -> list[str]:
        """The states that this device reports in a state dict."""
        return [name for name, (place, _) in self.turns.items() if place == 0]

    def known(self, buffer: str) -> Tensors:
        """The tensors of a buffer."""
        return self.part.values[buffer]

    @property
    def codes(self) -> dict[str, str]:
        """The key of each region's costs. Parts of experts have the code of all experts."""
        return {name: region.code for name, region in self.part.regions.items()}


def assigned(common: CommonPart, part: RolePart, device: Device) -> Assignment:
    """The assignment of a device of a role."""
    plan = bind(part.role, common.groups, device)
    needs = required_communicators(common.met, common.groups, plan)
    named = ((bucket, row[0]) for bucket, rows in part.contents.items() for row in rows)
    first = {bucket: common.statistics[name] for bucket, name in named if name in common.statistics}
    turns = state_turns(common.met, common.groups, plan, first)
    return Assignment(plan, needs, turns, common, part)


def assignments(captured: Captured, compiled: Compiled) -> Iterator[Assignment]:
    """The assignments of all devices, in rising order."""
    common, parts = common_part(captured, compiled), role_parts(captured, compiled)
    of = compiled.roles.of
    return (assigned(common, parts[of[device]], device) for device in sorted(of))


def assignment(captured: Captured, compiled: Compiled, device: Device) -> Assignment:
    """The assignment of one device."""
    role = compiled.roles.of[device]
    part = role_part(captured, compiled.dag.seen_by(role), compiled.by_role[1][role])
    return assigned(common_part(captured, compiled), part, device)


def common_part(captured: Captured, compiled: Compiled) -> CommonPart:
    groups, roles = compiled.by_role
    model = compiled.dag.model
    loss = model.values[model.loss].specs[0].dtype
    met, whole = role_meetings(list(roles.values())), captured.inputs.whole
    rest = whole, statistics_of(compiled.dag), captured.visit.asked
    return CommonPart(groups, met, loss, captured.form, *rest)


def statistics_of(dag: Dag) -> dict[str, Device]:
    """Buffers in regions that update some on several devices, and the first of these devices."""
    place, buckets = {one.region: one.devices or () for one in dag.computes}, dag.model.buckets
    return {
        parameter.name: place[region.id][0]
        for region in dag.model.regions if region.stateful and len(place[region.id]) > 1
        for bucket in region.buckets if buckets[bucket].buffers
        for parameter in buckets[bucket].parameters
    }  # fmt: skip


def role_parts(captured: Captured, compiled: Compiled) -> dict[Device, RolePart]:
    """The part of each role, by its first device."""
    _, roles = compiled.by_role
    seen = compiled.dag.seen_by
    return {device: role_part(captured, seen(device), role) for device, role in roles.items()}


def role_part(captured: Captured, dag: Dag, role: RolePlan) -> RolePart:
    plan, model = role.plan, dag.model
    buckets = {s.bucket: model.buckets[BucketId(s.bucket)] for s in plan.states}
    found = dict(regions_of(plan, captured, dag))
    of_experts = captured.experts.codes
    return RolePart(
        role=role,
        contents={name: contents(bucket) for name, bucket in buckets.items()},
        trainable={name: bucket.trainable for name, bucket in buckets.items()},
        regions=found,
        experts=tuple(n for n in found if model.by_id[RegionId(n)].code in of_experts),
        values=dict(known_values(plan, dag)),
    )


def contents(bucket: Bucket) -> tuple[Named, ...]:
    return tuple(
        (p.name, tuple(size or 0 for size in p.spec.shape), p.spec.dtype) for p in bucket.parameters
    )


def regions_of(plan: Plan, captured: Captured, dag: Dag) -> Iterator[tuple[str, RegionCode]]:
    runs = (one.region for one in plan.instructions if isinstance(one, Run))
    for name in map(RegionId, dict.fromkeys(runs)):
        cut = dag.shardings.get(name)
        yield name, captured.code(dag.model.by_id[name], cut.ways if cut else 1)


def known_values(plan: Plan, dag: Dag) -> Iterator[tuple[str, Tensors]]:
    """The tensors that kernels read and write. A sum has those of its first part."""
    inputs = {name: value for name, (value, _) in input_buffers(dag).items()}
    parts = {one.into: one.value for one in plan.instructions if isinstance(one, Keep)}
    for buffer in dict.fromkeys(chain.from_iterable(map(touched, plan.instructions))):
        known = inputs.get(buffer) or dag.local_values.get(ValueId(parts.get(buffer, buffer)))
        if known is not None:
            yield buffer, (tuple((s.shape, s.dtype) for s in known.specs), known.bundle)


def touched(one: Instruction) -> tuple[str, ...]:
    match one:
        case Run():
            return (*one.reads, *one.writes)
        case Load():
            return (one.value,)
    return ()


def grouped(values: Mapping[str, Tensors]) -> list[tuple[Tensors, list[str]]]:
    """Values by tensors, which are the same for all microbatches."""
    found: dict[Tensors, list[str]] = {}
    for name, tensors in values.items():
        found.setdefault(tensors, []).append(name)
    return list(found.items())


def common_json(common: CommonPart) -> str:
    return json.dumps(
        {
            "rows": common.groups.roles.rows,
            "groupings": common.groups.groupings,
            "links": common.met.links,
            "dynamic_links": common.met.dynamic_links,
            "collectives": common.met.collectives,
            "holders": common.met.holders,
            "loss": common.loss,
            "form": form_to_json(common.form),
            "whole": sorted(common.whole),
            "statistics": common.statistics,
            "asked": common.asked,
        }
    )


def common_from_json(text: str) -> CommonPart:
    found = json.loads(text)
    holders = {name: frozen(rows) for name, rows in found["holders"].items()}
    links, dynamic = frozen(found["links"]), frozen(found["dynamic_links"])
    groups = JobGroups(Roles(frozen(found["rows"])), frozen(found["groupings"]))
    met = RoleMeetings(links, dynamic, frozen(found["collectives"]), holders)
    form, whole = form_from_json(found["form"]), frozenset(found["whole"])
    rest = whole, found["statistics"], found["asked"]
    return CommonPart(groups, met, found["loss"], form, *rest)


def role_json(part: RolePart) -> str:
    return json.dumps(
        {
            "plan": plan_to_json(part.role.plan),
            "meetings": part.role.meetings,
            "holdings": part.role.holdings,
            "turns": part.role.turns,
            "contents": part.contents,
            "trainable": part.trainable,
            "regions": {name: field_values(region) for name, region in part.regions.items()},
            "experts": part.experts,
            "values": grouped(part.values),
        }
    )


def role_from_json(text: str) -> RolePart:
    found = json.loads(text)
    values = [(frozen(tensors), names) for tensors, names in found["values"]]
    bindings = (frozen(found[name]) for name in ("meetings", "holdings", "turns"))
    return RolePart(
        role=RolePlan(plan_from_json(found["plan"]), *bindings),
        contents={name: frozen(rows) for name, rows in found["contents"].items()},
        trainable=found["trainable"],
        regions={name: region_code(*row) for name, row in found["regions"].items()},
        experts=tuple(found["experts"]),
        values={name: tensors for tensors, names in values for name in names},
    )


def region_code(code: str, ways: int, dropout: int, random: list[tuple[str, int]]) -> RegionCode:
    return RegionCode(code, ways, dropout, tuple((Phase(phase), read) for phase, read in random))
