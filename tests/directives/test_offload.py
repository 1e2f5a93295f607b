"""Offload: what is copied to the host, when it comes back, and what cannot be offloaded."""

from __future__ import annotations

from typing import Any

import pytest
from synthetic import chain

from piper.directives import Directive, Offload, Order, Place, Split, Strategy
from piper.errors import DirectiveError, Refused
from piper.ir.filters import where
from piper.ir.nodes import Fetch, Store
from piper.ir.text.parse import parse
from piper.ir.text.text import text
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.view.reports.offload import offload

PARTS = 4
PLACED: list[Directive] = [Place(where(), [0]), Split("MB", PARTS)]
ALL_FORWARDS_FIRST = Order(
    [[where(PP=s, MB=m, PASS="F")] for m in range(PARTS) for s in (0, 1)]
    + [[where(PP=s, MB=m, PASS="B")] for m in range(PARTS) for s in (1, 0)]
)


def compiled(*more: Directive) -> Compiled:
    return compile_strategy(chain(2), [*PLACED, *more, ALL_FORWARDS_FIRST])


def around(found: Compiled, name: str) -> list[str]:
    """The sequence from the pass before a node to the pass after it, with copies."""
    names = list(found.dag.sequence)
    at = names.index(name)
    return names[at - 2 : at + 3]


def test_a_forward_is_stored_and_its_backward_reads_what_comes_back() -> None:
    found = compiled(Offload(where(PP=0)))

    backward = next(node for node in found.dag.computes if node.id == "PP0:B@1")
    assert ("back:saved:PP0@1",) in backward.reads
    assert ("saved:PP0@1",) not in backward.reads
    assert found.dag.values["host:saved:PP0@1"].host
    assert around(found, "fetch back:saved:PP0@1")[-2:] == ["PP1:B@1", "PP0:B@1"]
    assert around(found, "store saved:PP0@1")[1] == "PP0:F@1"


def test_other_regions_keep_what_they_have() -> None:
    found = compiled(Offload(where(PP=0)))

    stored = [node.reads[0][0] for node in found.dag.nodes.values() if isinstance(node, Store)]
    assert stored == [f"saved:PP0@{m}" for m in range(PARTS)]


def test_an_input_that_two_regions_need_in_their_backwards_is_stored_once() -> None:
    """h0 is an input of PP1 only; every backward of PP1 reads it again."""
    found = compiled(Offload(where()))

    nodes = found.dag.nodes.values()
    stored = [node.reads[0][0] for node in nodes if isinstance(node, Store)]
    fetched = [node.reads[0][0] for node in nodes if isinstance(node, Fetch)]
    assert "h0@0" in stored
    assert len(stored) == len(set(stored))
    assert {f"host:{value}" for value in stored} == set(fetched)


def test_what_would_come_back_at_once_stays() -> None:
    """The last microbatch of the last region goes straight to its backward."""
    found = compile_strategy(
        chain(1),
        [*PLACED, Offload(where()), Order(
            [[where(MB=m, PASS=p)] for m in range(PARTS) for p in ("F", "B")]
        )],
    )  # fmt: skip

    assert not any(isinstance(node, Store | Fetch) for node in found.dag.nodes.values())


def test_parameters_are_fetched_for_each_pass_and_stored_after_the_update() -> None:
    found = compiled(Offload(where(PP=0), "parameters", buffers=1)).dag

    assert found.values["w:PP0"].host and not found.values["w:PP1"].host
    reads = [node.reads[0][0] for node in found.computes if node.region == "PP0"]
    fetches = [n.writes[0] for n in found.nodes.values() if isinstance(n, Fetch)]
    assert {value for value in reads if "w:" in value} <= set(fetches)
    (store,) = [node for node in found.nodes.values() if isinstance(node, Store)]
    update = found.nodes[found.producers[store.reads[0][0]]]
    assert update.id == "PP0:U"
    assert store.writes == ("w:PP0'",)


def test_parameters_that_are_still_on_the_device_are_not_fetched_again() -> None:
    """One region alone: its parameters are needed in every pass, and by the update."""
    program = [*PLACED, Offload(where(), "parameters")]

    found = compile_strategy(chain(1), program).dag

    assert [n.id for n in found.nodes.values() if isinstance(n, Fetch)] == ["fetch back:w:PP0"]


def test_it_may_stand_anywhere() -> None:
    program: list[Directive] = [*PLACED, ALL_FORWARDS_FIRST]
    plans = [
        compile_strategy(chain(2), [*program[:k], Offload(where()), *program[k:]]).plans
        for k in range(len(program) + 1)
    ]

    assert all(other == plans[0] for other in plans)
    assert plans[0] != compile_strategy(chain(2), program).plans


def test_the_text_of_a_dag_has_it_all() -> None:
    copies = Offload(where(), stream="copies", ahead=2, buffers=3)
    dag = compiled(copies, Offload(where(), "parameters"), Offload(where(PP=0), "optimizer")).dag

    shown = text(dag)

    again = parse(shown, dag.model)
    assert "offload activations of PP0, PP1: stream=copies ahead=2 buffers=3" in shown
    assert (again.nodes, again.offloads) == (dag.nodes, dag.offloads)
    assert text(again) == shown


def test_what_show_says() -> None:
    found = compiled(
        Offload(where(PP=0)), Offload(where(), "optimizer"), Offload(where(PP=1), "parameters")
    )

    shown = offload(found.dag, found.plans).splitlines()

    assert shown[0] == "activations of PP0: in host memory"
    assert shown[1] == "optimizer state of PP0, PP1: in host memory"
    assert shown[2] == "parameters of PP1: in host memory"
    assert shown[3].startswith("  7 stores (") and shown[3].endswith("in a step, on 1 device")


def test_it_is_one_line_of_json() -> None:
    strategy = Strategy([Offload(where(PP=0), buffers=3)])

    written = strategy.to_json()

    assert written == (
        '[\n  {"op": "offload", "filter": {"PP": 0}, "what": "activations", "stream": "offload", '
        '"buffers": 3}\n]\n'
    )
    assert Strategy.from_json(written) == strategy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"what": "weights"}, "what='weights' cannot wait in host memory\n  fix: write "),
        ({"stream": "compute"}, "the stream 'compute' is reserved: Piper uses it itself\n"),
        ({"ahead": -1}, "ahead=-1 is not a valid count\n  fix: write a whole number, 0 or more"),
        ({"buffers": 0}, "buffers=0 is not a valid count\n  fix: write a whole number, 1 or more"),
    ],
)
def test_what_cannot_be_written(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        Offload(where(), **arguments)

    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ([Offload(where(PP=0)), Offload(where())], "PP0 is already offloaded\n"),
        ([Offload(where(PP=0, PASS="F"))], "`Offload` moves what is kept between"),
    ],
)
def test_what_cannot_be_offloaded(program: list[Offload], message: str) -> None:
    with pytest.raises(DirectiveError) as refused:
        compiled(*program)

    assert message in str(refused.value)
