"""Remat: which regions are recomputed, and what their passes then read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic import chain

from piper.directives import Directive, Order, Place, Remat, Split, Strategy, apply
from piper.directives.arguments import Kept
from piper.errors import DirectiveError, Refused
from piper.ir.dag import Dag
from piper.ir.filters import where
from piper.ir.model import Model, Region
from piper.ir.naming import carry, saved
from piper.ir.remat_policy import Recomputation
from piper.ir.training import training_dag
from piper.job.compile.compiler import compile_strategy
from piper.names import RegionId

TWO = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]
MB = Split("MB", 2)
HALVES = Order([[where(PP=0, PASS="F")], [where(PP=0, PASS="BI")], [where(PP=0, PASS="BW")]])


def keeping(region: Region) -> Region:
    """Its backward reads what F kept, and no input; if it is recomputed, it reads them all."""
    again = replace(region, code="again", saved=(), carry=region.carry * 2)
    some = replace(region, code="some")
    variants = {
        (): replace(again, recomputes=Recomputation(())),
        0.5: replace(some, recomputes=Recomputation(0.5)),
    }
    return replace(region, backward_inputs=(), weight_inputs=(), recomputed=variants)


def model() -> Model:
    kept = chain(2)
    return replace(kept, regions=tuple(map(keeping, kept.regions)))


def rewritten(*program: Directive) -> Dag:
    return apply(program, training_dag(model()))


def reads(dag: Dag, node: str) -> str:
    return ", ".join(map("+".join, next(n for n in dag.computes if n.id == node).reads))


def test_the_backward_reads_the_inputs_and_the_forward_keeps_nothing() -> None:
    kept, dag = rewritten(), rewritten(Remat(where(PP=0)))

    assert reads(kept, "PP0:B") == "w:PP0, saved:PP0, d:h0/PP1"
    assert reads(dag, "PP0:B") == "w:PP0, x, saved:PP0, d:h0/PP1"
    assert dag.values[saved(RegionId("PP0"))].nbytes == 0
    assert [region.code for region in dag.model.regions] == ["again", "block"]
    assert reads(dag, "PP1:B") == reads(kept, "PP1:B")


def test_halves_of_every_microbatch_read_and_carry_their_own() -> None:
    dag = rewritten(*TWO, MB, HALVES, Remat(where(PP=0)))

    assert reads(dag, "PP0:BI@1") == "w:PP0, x@1, saved:PP0@1, d:h0/PP1@1"
    assert reads(dag, "PP0:BW@1") == "x@1, carry:PP0@1, d:h0/PP1@1"
    assert len(dag.values[f"{carry(RegionId('PP0'))}@1"].specs) == 2


def test_it_may_stand_anywhere() -> None:
    program = [*TWO, MB, HALVES]
    plans = [
        compile_strategy(model(), [*program[:k], Remat(where()), *program[k:]]).plans
        for k in range(len(program) + 1)
    ]

    assert all(other == plans[0] for other in plans)
    assert plans[0] != compile_strategy(model(), program).plans


def test_a_region_without_backward_stays_as_it_is() -> None:
    first, last = model().regions
    still = replace(model(), regions=(replace(first, has_backward=False), last))

    dag = apply([Remat(where())], training_dag(still))

    assert [bool(region.recomputes) for region in dag.model.regions] == [False, True]


def test_it_is_one_line_of_json() -> None:
    strategy = Strategy([Remat(where(PP=0, EP="*"))])

    text = strategy.to_json()

    assert text == '[\n  {"op": "remat", "filter": {"PP": 0, "EP": "*"}}\n]\n'
    assert Strategy.from_json(text) == strategy


def test_what_it_keeps_chooses_the_description() -> None:
    dag = rewritten(Remat(where(PP=0), keep=0.5), Remat(where(PP=1)))

    assert [region.code for region in dag.model.regions] == ["some", "again"]


@pytest.mark.parametrize(
    ("keep", "found"),
    [
        ("matmuls", ("matmuls",)),
        (["attention", "matmuls"], ("matmuls", "attention")),
        (0, ()),
        (1, 1.0),
        (0.5, 0.5),
        ("auto", "auto"),
    ],
)
def test_what_is_kept_may_be_written_in_several_ways(keep: Kept, found: Kept) -> None:
    remat = Remat(where(), keep)

    assert remat.keep == found
    assert Strategy.from_json(Strategy([remat]).to_json()) == Strategy([remat])


def test_a_limit_leaves_the_choice_to_the_compiler() -> None:
    remat = Remat(where(), memory_gib=0.5)

    assert remat.is_auto
    assert remat == Remat(where(), "auto", 0.5)
    assert [region.code for region in rewritten(remat).model.regions] == ["block", "block"]
    assert all(region.recomputes.auto for region in rewritten(remat).model.regions)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"keep": "softmax"},
            "keep='softmax' is not something that can be kept\n"
            '  fix: write "costly", "matmuls", "attention", "topk", a list of these, a share such '
            'as 0.5, or "auto"',
        ),
        (
            {"keep": 1.5},
            "keep=1.5 is not something that can be kept\n"
            '  fix: write "costly", "matmuls", "attention", "topk", a list of these, a share such '
            'as 0.5, or "auto"',
        ),
        (
            {"keep": "matmuls", "memory_gib": 4},
            'memory_gib is for keep="auto" only\n  fix: leave out one of them',
        ),
        (
            {"memory_gib": 0},
            "memory_gib=0 is not an amount of memory\n  fix: write GiB of one device, such as 80",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        Remat(where(), **arguments)

    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            [Remat(where(PP=0, PASS="BI"))],
            "remat (directive 1 of 1): where(PP=0, PASS='BI') selects some of a region's work, but "
            "`Remat` changes all of it\n  fix: leave PASS out of the filter",
        ),
        (
            [MB, Remat(where(MB=1))],
            "remat (directive 2 of 2): where(MB=1) selects some of a region's work, but "
            "`Remat` changes all of it\n  fix: leave MB out of the filter",
        ),
        (
            [Remat(where(PP=1)), Remat(where())],
            "remat (directive 2 of 2): PP1 is already recomputed\n"
            "  fix: match each region with at most one `Remat`",
        ),
        (
            [Remat(where(PP=7))],
            "remat (directive 1 of 1): where(PP=7) matches nothing\n"
            "  fix: choose from what exists: PP: 0, 1",
        ),
    ],
)
def test_what_is_not_supported(program: list[Directive], message: str) -> None:
    with pytest.raises(DirectiveError) as refused:
        rewritten(*program)

    assert str(refused.value) == message
