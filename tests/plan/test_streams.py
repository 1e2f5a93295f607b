"""What streams know of each other: only what they have waited for, as on a GPU.

The runtime on CPUs computes on the host and waits there, so it never sees what is found here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from draws import one_of
from plan.mutants import reads_of
from synthetic import chain, moe_chain

from piper.directives import Directive, Order, Place, Replicate, Shard, Split
from piper.ir.filters import where
from piper.ir.model import Model
from piper.job.compile.compiler import compile_strategy
from piper.names import COMPUTE
from piper.plan.instructions import (
    Add,
    Exchange,
    Free,
    Gather,
    Instruction,
    Keep,
    Load,
    Plan,
    Recv,
    Reduce,
    Run,
    Update,
    line,
)  # fmt: skip


def stream_of(one: Instruction) -> str:
    """Totals add up on the compute stream."""
    return COMPUTE if one.stream == "loss_norm" else one.stream


def known_at(plan: Plan) -> list[set[int]]:
    """For each instruction, all that has ended for sure when it starts."""
    known: list[set[int]] = []
    last: dict[str, int] = {}
    for k, one in enumerate(plan.instructions):
        before = [*one.waits, *([last[stream_of(one)]] if stream_of(one) in last else [])]
        known.append(set(before).union(*(known[w] for w in before)))
        last[stream_of(one)] = k
    return known


def reads(one: Instruction) -> tuple[str, ...]:
    return (*reads_of(one), f"w:{one.bucket}") if isinstance(one, Update) else reads_of(one)


def writes(one: Instruction) -> tuple[str, ...]:
    match one:
        case Run() | Exchange():
            return one.writes
        case Keep() | Add() | Reduce():
            return (one.into,)
        case Gather():
            return one.into, f"buffer {one.buffer}"
        case Load() | Recv():
            return (one.value,)
        case Update():
            return (f"w:{one.bucket}",)
    return ()


def races(plan: Plan) -> Iterator[str]:
    """Reads that may come before the write, and writes that may come before an earlier read."""
    known = known_at(plan)
    maker: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    place = {one.into: f"buffer {one.buffer}" for one in plan.instructions if is_gather(one)}
    for k, one in enumerate(plan.instructions):
        for name in reads(one):
            if name in maker and maker[name] not in known[k]:
                yield f"«{line(one)}» may read {name} before it is there"
            readers.setdefault(place.get(name, name), []).append(k)
        for name in writes(one):
            early = [r for r in readers.pop(name, ()) if r != k and r not in known[k]]
            for reader in early:
                yield f"«{line(one)}» may come before «{line(plan.instructions[reader])}»"
            maker[name] = k


def is_gather(one: Instruction) -> bool:
    return isinstance(one, Gather)


def replicated(model: Model, zero: int, buffers: int = 2, **devices: list[int]) -> list[str]:
    """The races of stages on these devices; those on several have replicas there."""
    program: list[Directive] = []
    for stage, found in devices.items():
        program.append(Place(where(PP=int(stage[2:])), found))
        if len(found) > 1:
            wanted = where(PP=int(stage[2:]))
            program.append(Replicate(wanted, found, zero, gather_buffers=buffers))
    plans = compile_strategy(model, [*program, Split("MB", 2)]).plans
    return [race for plan in plans for race in races(plan)]


@pytest.mark.parametrize("zero", range(4))
def test_a_pipeline_of_replicas_has_no_races(zero: int) -> None:
    assert replicated(chain(2), zero, PP0=[0, 2], PP1=[1, 3]) == []


def test_a_buffer_is_filled_again_after_its_last_use() -> None:
    assert replicated(chain(2), 3, 1, PP0=[0, 1], PP1=[0, 1]) == []


def test_what_is_gathered_is_waited_for_where_it_is_used_and_where_it_is_sent() -> None:
    assert replicated(chain(2, tied=True), 1, PP0=[0, 2], PP1=[1, 3]) == []


def test_an_update_waits_for_its_shard() -> None:
    assert replicated(chain(1, tied=True), 1, PP0=[0, 1]) == []


def test_new_parameters_arrive_after_the_last_use_of_the_old_ones() -> None:
    assert replicated(chain(2, tied=True), 0, PP0=[0], PP1=[1]) == []


@one_of(2)
@pytest.mark.parametrize("stream", ["ep", "dp"])
@pytest.mark.parametrize("zero", range(4))
def test_rows_are_waited_for_where_they_are_read_and_where_they_end(zero: int, stream: str) -> None:
    """Frees count as writes: what is on its way must not end."""
    four = [0, 1, 2, 3]
    keep, cut = Replicate(where(), four, zero), Shard(where(EP="*"), [[0, 1], [2, 3]], stream)
    slots = [[where(MB=0, PASS=p), where(MB=1, PASS=p)] for p in ("F", "B")]
    program = [Place(where(), four), keep, cut, Split("MB", 2), Order(slots)]

    plans = compile_strategy(moe_chain(1, layers=2), program).plans

    assert [race for plan in plans for race in (*races(plan), *early_ends(plan))] == []


def early_ends(plan: Plan) -> Iterator[str]:
    """Values that end while an exchange may still read or write them."""
    known, under_way = known_at(plan), dict[str, list[int]]()
    for k, one in enumerate(plan.instructions):
        if isinstance(one, Exchange):
            for name in (*one.reads, *one.writes):
                under_way.setdefault(name, []).append(k)
        if isinstance(one, Free):
            for name in one.values:
                if not known[k].issuperset(under_way.pop(name, ())):
                    yield f"«{line(one)}» may end {name} while it travels"
