"""View data has all that a page shows, and survives JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from synthetic import chain, moe_chain
from views import built, compiled, experts, pipeline

from piper.plan.analyse.memory import peak
from piper.view.page import page
from piper.view.view_data import ViewData, different_first, view_data


def row(found: ViewData, node: str) -> dict[str, object]:
    k = found.nodes["id"].index(node)
    return {name: column[k] for name, column in found.nodes.items()}


def test_view_data_survives_json() -> None:
    for found in (pipeline(), experts()):
        again = ViewData.from_json(found.to_json())

        assert replace(again, traces=()) == replace(found, traces=())
        assert ViewData.from_json(again.to_json()) == again  # times are rounded once
        assert again.traces[0].seconds == pytest.approx(found.traces[0].seconds)


def test_all_columns_of_a_table_are_equally_long() -> None:
    found = experts()

    tables = [found.nodes, found.orders, *(one.instructions for one in found.devices)]
    tables += [one.memory for one in found.devices]

    assert all(len({len(column) for column in table.values()}) == 1 for table in tables)


def test_a_node_says_who_made_it_where_it_comes_from_and_what_it_needs() -> None:
    found = pipeline()

    backward = row(found, "PP1:B@1")

    assert backward["region"] == "PP1"
    assert backward["tags"] == "PP=1 MB=1"
    assert str(backward["maker"]).startswith("split (directive ")
    assert backward["source"] == "model.py:2"
    assert backward["expected"] == 2.0
    needed = [found.nodes["id"][k] for k in backward["data"]]  # type: ignore[attr-defined]
    assert "PP1:F@1" in needed


def test_communication_belongs_to_the_region_that_wrote_what_it_moves() -> None:
    found = pipeline()
    sends = [k for k, kind in enumerate(found.nodes["kind"]) if kind == "send"]

    places = {found.nodes["id"][k]: found.nodes["source"][k] for k in sends}

    assert places["send h0@0>1"] == "model.py:1"
    assert all(found.nodes["bytes"][k] == 32 for k in sends)


def test_temporal_edges_name_the_directive_that_asked_for_them() -> None:
    found = pipeline()
    ids, orders = found.nodes["id"], found.orders

    edges = {
        (ids[a], ids[b]): maker
        for before, after, maker in zip(*orders.values(), strict=True)
        for a in before
        for b in after
    }

    assert edges["PP0:F@0", "PP0:F@1"].startswith("order (directive ")


def test_every_instruction_says_what_it_is_and_what_it_waits_for() -> None:
    made = compiled("dualpipev", moe_chain(4), pp=2, dp=2, ep=2, zero=2, microbatches=4)

    found = view_data("dualpipev", made.dag, made.plans)

    kinds = {kind for one in found.devices for kind in one.instructions["kind"]}
    assert kinds >= {"F", "BI", "BW", "send", "recv", "exchange", "reduce-scatter", "gather"}
    first, plan = found.devices[0].instructions, made.plans[0]
    assert first["waits"] == [list(one.waits) for one in plan.instructions]
    assert all(
        found.nodes["id"][k] == one.node if k >= 0 else not one.node
        for k, one in zip(first["node"], plan.instructions, strict=True)
    )


def test_the_worst_moment_is_that_of_the_plan_and_names_its_buffers() -> None:
    made = compiled("1f1b", chain(2), pp=2, microbatches=3)

    found = view_data("1f1b", made.dag, made.plans).devices[0]

    worst = peak(made.dag, made.plans[0])
    assert found.peak["total"] == worst.total
    in_time = [sum(held) for held in zip(*list(found.memory.values())[1:], strict=True)]
    assert max(in_time) + sum(found.lasting.values()) == worst.total
    names = [name for name, _, _ in found.peak["largest"]]
    assert any(name.startswith("saved:") for name in names)


def test_without_a_trace_everything_is_where_the_compiler_expects_it() -> None:
    made = compiled("1f1b", chain(2), pp=2, microbatches=3)

    trace = view_data("1f1b", made.dag, made.plans).traces[0]

    at = [getattr(one, "node", "") for one in made.plans[1].instructions].index("PP1:B@0")
    (span,) = [span for span in trace.spans[1] if span.at == at]
    assert (span.start, span.end) == made.dag.times["PP1:B@0"]  # type: ignore[index]


def test_of_very_many_devices_one_of_each_kind_is_kept() -> None:
    made = compiled("1f1b", chain(2), pp=2, dp=6, microbatches=2)

    found = view_data("1f1b", made.dag, made.plans, most=4)

    assert len(found.devices) == 4 and found.left_out == 8
    regions = {found.nodes["region"][k] for one in found.devices for k in one.instructions["node"]}
    assert regions >= {"PP0", "PP1"}
    assert set(found.traces[0].spans) == {one.device for one in found.devices}


def test_few_devices_are_all_kept() -> None:
    made = compiled("1f1b", chain(2), pp=2, dp=2, microbatches=2)

    assert different_first(made.plans, 4) == list(made.plans)


def test_a_name_cannot_break_out_of_the_page() -> None:
    evil = "</script><img src=x onerror=alert(1)>{{script}}"
    found = replace(pipeline(), name=evil)

    text = page([found])

    assert "<img" not in text
    head, _, rest = text.partition('<script type="application/json" id="data">')
    data = rest.partition("</script>")[0]
    assert "&lt;/script&gt;" in head
    assert json.loads(data)[0]["name"] == evil


def test_the_page_asks_for_nothing_from_outside() -> None:
    text = page([built("zb-h1", chain(2), pp=2, microbatches=2)])

    assert "src=" not in text and "@import" not in text and "fetch(" not in text
    outside = [part for part in text.split('"') if part.startswith(("http:", "https:"))]
    assert set(outside) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
