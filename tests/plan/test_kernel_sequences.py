"""Neighbouring runs become one call, and everything else stays what and where it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from draws import one_of
from synthetic import chain

from piper.directives import Place, Split
from piper.ir.filters import where
from piper.job.compile.compiler import compile_strategy
from piper.plan.analyse import kernel_sequences
from piper.plan.analyse.kernel_sequences import KernelSequence, Part, sequences
from piper.plan.instructions import Plan, Run, is_message
from piper.strategies import BUILDERS

NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev")
EVERY = [  # every level of a schedule early or late; the other way is a soak
    pytest.param(name, zero, late, marks=pytest.mark.soak if (k + zero + late) % 2 else ())
    for k, name in enumerate(NAMES)
    for zero in (0, 1, 2, 3)
    for late in (False, True)
]


def plans(name: str, zero: int, late: bool, dp: int = 2) -> tuple[Plan, ...]:
    strategy = BUILDERS[name](pp=2, dp=dp, zero=zero, microbatches=4)
    model = chain(8, skips=((0, 2), (1, 5), (4, 6)), tied=dp > 1 and zero % 2 == 0)
    return compile_strategy(model, strategy, late=late).plans


def one_device(regions: int, parts: int = 2) -> Plan:
    return compile_strategy(chain(regions), [Place(where(), (0,)), Split("MB", parts)]).plans[0]


def joined(plan: Plan, fits: Any = lambda run: True) -> list[Part]:
    return list(sequences(plan, range(len(plan.instructions)), fits, kernel_sequences.MOST))


def order(parts: list[Part]) -> Iterator[int]:
    """The positions in the order in which they are done."""
    for part in parts:
        yield from (part,) if isinstance(part, int) else (*part.at, *part.then)


@one_of(2)
@pytest.mark.parametrize(("name", "zero", "late"), EVERY)
def test_everything_is_done_once_and_after_what_it_needs(name: str, zero: int, late: bool) -> None:
    random = Random(f"{name}{zero}{late}")
    for plan in plans(name, zero, late):
        apart = {run.region for run in plan.instructions if isinstance(run, Run)}
        apart = {region for region in sorted(apart) if random.random() < 0.2}
        parts = joined(plan, lambda run, apart=apart: run.region not in apart)

        assert_equivalent(plan, list(order(parts)))
        for part in parts:
            if isinstance(part, KernelSequence):
                assert_sound(plan, part)
                assert not apart & {run.region for run in part.runs}


def assert_equivalent(plan: Plan, done: list[int]) -> None:
    """Each value is made before it is read, and read before it ends; messages keep their order."""
    code = plan.instructions
    assert sorted(done) == list(range(len(code)))
    assert [k for k in done if is_message(code[k])] == [
        k for k, one in enumerate(code) if is_message(one)
    ]
    when = {k: turn for turn, k in enumerate(done)}
    reads = [{*one.uses} for one in code]
    changes = [{*one.defines, *one.ends} for one in code]
    for k, one in enumerate(code):
        assert all(when[w] < when[k] for w in one.waits)
        touches = reads[k] | changes[k]
        for j in range(k):
            if not (changes[j].isdisjoint(touches) and reads[j].isdisjoint(changes[k])):
                assert when[j] < when[k], (str(code[j]), str(one))


def assert_sound(plan: Plan, part: KernelSequence) -> None:
    """No message between its runs; wires lead to the values of the same names."""
    code = plan.instructions
    between = code[part.at[0] + 1 : part.at[-1]]
    assert not any(map(is_message, between))
    assert not any(is_message(code[w]) for run in part.runs[1:] for w in run.waits)
    assert len(part.runs) <= kernel_sequences.MOST
    for run, sources in zip(part.runs, part.wiring.reads, strict=True):
        named = [
            part.reads[source]
            if isinstance(source, int)
            else part.runs[source[0]].writes[source[1]]
            for source in sources
        ]
        assert named == list(run.reads)
    assert [part.runs[run].writes[k] for run, k in part.wiring.results] == list(part.writes)
    inside = {name for run in part.runs for name in run.writes} - set(part.writes)
    others = (one for k, one in enumerate(code) if k not in part.at)
    assert not any(inside.intersection(one.uses) for one in others)


def test_a_device_without_messages_joins_all_its_layers() -> None:
    parts = joined(one_device(4))

    assert [len(part.runs) for part in parts if isinstance(part, KernelSequence)] == [4] * 4


def test_long_sequences_are_cut_evenly() -> None:
    parts = joined(one_device(10, parts=1))

    assert [len(part.runs) for part in parts if isinstance(part, KernelSequence)] == [5] * 4


def test_all_microbatches_have_equal_sequences() -> None:
    """Otherwise each kind would be compiled: receives are posted where a sequence starts."""
    for late in (False, True):
        for plan in plans("1f1b", 0, late, dp=1):
            found = [part for part in joined(plan) if isinstance(part, KernelSequence)]
            kinds = {(tuple(run.region for run in part.runs), part.wiring) for part in found}
            members = Counter((run.region, run.phase) for part in found for run in part.runs)
            assert found and len(kinds) <= 4, kinds
            assert set(members.values()) == {4}  # once in each microbatch


def test_gathers_keep_layers_apart() -> None:
    for plan in plans("1f1b", 3, late=False):
        longest = max((len(p.runs) for p in joined(plan) if not isinstance(p, int)), default=1)
        assert longest <= 2
