"""What one device needs of a compiled job: its plan, parameters, regions and communicators."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from piper.capture import Captured
from piper.capture.kernels.callables import RegionCode
from piper.capture.trace.ignored_labels import Ignored
from piper.ir.dag import Dag
from piper.ir.model import Bucket
from piper.job.compiler import Compiled
from piper.names import BucketId, Device, Phase, RegionId, ValueId
from piper.plan.analyse.required_communicators import (
    RequiredCommunicators,
    reported_states,
    required_communicators,
    token_groups,
)
from piper.plan.inputs import input_buffers
from piper.plan.instructions import Instruction, Keep, Load, Plan, Run, Shape
from piper.plan.serialization import field_values, frozen
from piper.plan.serialization import from_json as plan_from_json
from piper.plan.serialization import to_json as plan_to_json
from piper.runtime.state.device_state import Named

Tensors = tuple[tuple[Shape, ...], bool]  # the tensors of a buffer, and whether it is a bundle


@dataclass(frozen=True, slots=True)
class Assignment:
    """One device's part. `needs`, `loss` and `ignored` are the same for all."""

    plan: Plan
    needs: RequiredCommunicators
    loss: str  # dtype of the loss
    ignored: tuple[Ignored, ...]  # labels that a mean leaves out
    reported_states: tuple[str, ...]  # states that this device reports in a state dict
    contents: Mapping[str, tuple[Named, ...]]  # the parameters of each local bucket
    trainable: Mapping[str, bool]  # of each such bucket
    regions: Mapping[str, RegionCode]  # the code of each local region
    experts: tuple[str, ...]  # regions that look tensors regions of experts
    values: Mapping[str, Tensors]  # what kernels read and write, if known in advance

    def known(self, buffer: str) -> Tensors:
        """The tensors of a buffer."""
        return self.values[buffer]

    @property
    def codes(self) -> dict[str, str]:
        """The key of each region's costs. Parts of experts have the code of all experts."""
        return {name: region.code for name, region in self.regions.items()}

    @property
    def runs(self) -> list[tuple[str, Phase]]:
        """The regions and phases that this device runs, each once."""
        runs = (one for one in self.plan.instructions if isinstance(one, Run))
        return list(dict.fromkeys((run.region, Phase(run.phase)) for run in runs))


def assignments(captured: Captured, compiled: Compiled) -> Iterator[Assignment]:
    """The assignments of all devices that have a plan."""
    plans, dag = compiled.plans, compiled.dag
    shared, reported = required_communicators(plans), reported_states(plans)
    model, expert_codes = dag.model, captured.experts.codes
    loss = model.values[model.loss].specs[0].dtype
    experts = {str(region.id) for region in model.regions if region.code in expert_codes}
    for plan in plans:
        buckets = {s.bucket: model.buckets[BucketId(s.bucket)] for s in plan.states}
        found = dict(regions_of(plan, captured, dag))
        yield Assignment(
            plan=plan,
            needs=replace(shared, token_groups=tuple(token_groups(plan))),
            loss=loss,
            ignored=captured.ignored,
            reported_states=tuple(reported[plan.device]),
            contents={name: contents(bucket) for name, bucket in buckets.items()},
            trainable={name: bucket.trainable for name, bucket in buckets.items()},
            regions=found,
            experts=tuple(name for name in found if name in experts),
            values=dict(known_values(plan, dag)),
        )


def assignment(captured: Captured, compiled: Compiled, device: Device) -> Assignment:
    """The assignment of one device."""
    return next(one for one in assignments(captured, compiled) if one.plan.device == device)


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


def shared_json(one: Assignment) -> str:
    """The part that all devices share."""
    shared = {
        "streams": one.needs.streams,
        "teams": one.needs.teams,
        "links": one.needs.links,
        "dynamic_links": one.needs.dynamic_links,
        "loss": one.loss,
        "ignored": one.ignored,
    }
    return json.dumps(shared)


def own_json(one: Assignment) -> str:
    """The part of one device."""
    own = {
        "plan": plan_to_json(one.plan),
        "token_groups": one.needs.token_groups,
        "reported_states": one.reported_states,
        "contents": one.contents,
        "trainable": one.trainable,
        "regions": {name: field_values(region) for name, region in one.regions.items()},
        "experts": one.experts,
        "values": grouped(one.values),
    }
    return json.dumps(own)


def from_json(shared: str, own: str) -> Assignment:
    job, parts = json.loads(shared), json.loads(own)
    plan = plan_from_json(parts["plan"])
    values = [(frozen(tensors), names) for tensors, names in parts["values"]]
    common = {name: frozen(job[name]) for name in ("streams", "teams", "links", "dynamic_links")}
    token_groups = frozen(parts["token_groups"])
    return Assignment(
        plan=plan,
        needs=RequiredCommunicators(**common, token_groups=token_groups, shares=plan.streams),
        loss=job["loss"],
        ignored=frozen(job["ignored"]),
        reported_states=tuple(parts["reported_states"]),
        contents={name: frozen(rows) for name, rows in parts["contents"].items()},
        trainable=parts["trainable"],
        regions={name: region_code(*row) for name, row in parts["regions"].items()},
        experts=tuple(parts["experts"]),
        values={name: tensors for tensors, names in values for name in names},
    )


def region_code(code: str, ways: int, dropout: int, random: list[tuple[str, int]]) -> RegionCode:
    return RegionCode(code, ways, dropout, tuple((Phase(phase), read) for phase, read in random))
