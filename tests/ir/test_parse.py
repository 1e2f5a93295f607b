"""The text of a DAG can be read back, so that DAGs can be written by hand."""

from __future__ import annotations

import re
from random import Random
from textwrap import dedent

import pytest
from draws import one_of
from ir.test_shape import SEEDS, stages
from synthetic import chain

from piper.costs import Costs
from piper.directives import Place, Replicate, Stream, apply
from piper.errors import Refused
from piper.ir.dag import Dag
from piper.ir.filters import where
from piper.ir.rules import CAPTURED, require
from piper.ir.text.parse import parse
from piper.ir.text.text import text
from piper.ir.training import training_dag
from piper.passes.pass_pipeline import run_passes
from piper.passes.reductions import place_reductions
from piper.passes.transfers import insert_transfers

NOT_IN_THE_TEXT = ("stricter", "model", "transits", "times", "makers", "sequence")


def carried(dag: Dag) -> dict[str, object]:
    """All that the text tells."""
    found = {k: v for k, v in vars(dag).items() if k in Dag.__dataclass_fields__}
    makers = {name: dag.makers[name] for name in dag.nodes if name in dag.makers}
    rest = {k: v for k, v in found.items() if k not in NOT_IN_THE_TEXT}
    return {**rest, "makers": makers, "sequence": dag.sequence}


@one_of(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_print_parse_print_is_the_identity(seed: int) -> None:
    for sites, _ in stages(seed):
        dag, shown = sites.dag, text(sites.dag)

        again = parse(shown, dag.model)

        assert carried(again) == carried(dag)
        assert text(again) == shown


def test_streams_are_read_back() -> None:
    asked = [Stream("ep", 20, "high"), Stream("compute", 112), Stream("dp")]
    dag = apply([Place(where(), [0], stream="side"), *asked], training_dag(chain(1)))

    again = parse(text(dag), dag.model)

    assert carried(again) == carried(dag)


def broken(shown: str, random: Random) -> tuple[int, str]:
    """One line cut short, doubled, or with a name that nothing has; and which line that is."""
    rows = shown.splitlines()
    k = random.choice([k for k, row in enumerate(rows) if re.match(r"\S+ +\S.* on .*->", row)])
    row = rows[k]
    wrong, line = random.choice([
        ([row[: random.randrange(1, row.index("  #") + 2)]], k),
        ([row, row], k + 1),
        ([row.replace(": (", ": (nothing, ", 1)], k),
        ([row.replace(" -> ", " -> nothing, ", 1)], k),
        ([row.replace(" on ", " on device ", 1)], k),
        ([f"{row} before"[-9:]], k),
        ([re.sub(r"^\S+", "what", row)], k),
    ])  # fmt: skip
    return line + 1, "\n".join([*rows[:k], *wrong, *rows[k + 1 :]])


@one_of(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_line_that_makes_no_sense_is_refused_by_its_number(seed: int) -> None:
    random = Random(seed)
    for sites, _ in stages(seed):
        for _ in range(4):
            line, wrong = broken(text(sites.dag), random)

            with pytest.raises(Refused) as refused:
                parse(wrong, sites.dag.model)

            assert str(refused.value).startswith(f"line {line}: ")


TWO = """
    dag: 6 nodes, 2 regions
    F        PP0:F on [0]: (w:PP0, x) -> h0, saved:PP0  # capture
    F        PP1:F on [1]: (w:PP1, h0, y) -> loss, saved:PP1  # capture
    B        PP1:B on [1]: (w:PP1, h0, y, saved:PP1, seed) -> d:h0/PP1, g:PP1/PP1  # capture
    B        PP0:B on [0]: (w:PP0, x, saved:PP0, d:h0/PP1) -> g:PP0/PP0  # capture
    update   PP0:U on [0]: (g:PP0/PP0) -> w:PP0'  # capture
    update   PP1:U on [1]: (g:PP1/PP1) -> w:PP1'  # capture
"""


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (TWO.replace("6 nodes", "7 nodes"), "line 1: the DAG has 6 nodes, not 7\n"),
        (TWO.replace("dag:", "dog:"), "line 1: 'dog: 6 nodes, 2 regions' is not a line of a DAG\n"),
        (TWO.replace("h0, y)", "h7, y)"), "line 3: h7 is an unknown value\n"),
        (TWO.replace("F        PP1:F", "B        PP1:F"), "line 3: PP1:F is F, not B\n"),
        (TWO.replace("PP0:U", "PP7:U"), "line 6: PP7:U is an unknown update of a bucket\n"),
        (TWO + "before: PP0:F -> PP9:F  # order", "line 8: PP9:F is an unknown node\n"),
        (TWO + "value weight (float32[2]): q", "line 8: weight is an unknown role of a value\n"),
        (TWO + "value saved (real[2]): q", "line 8: real is an unknown type of a tensor\n"),
        (TWO + "value saved (int8[x]): q", "line 8: 'value saved (int8[x]): q' is not a line of"),
        (TWO + "buckets PP0 on [0]: zero=1 once=True", "line 8: message_bytes, reduce_stream, "),
        (TWO + "buckets PP0 on [0]: zero=one", "line 8: zero is 'one'\n"),
        (TWO + "buckets PP7 on [0]: zero=1", "line 8: message_bytes, reduce_stream, "),
        (TWO + "experts PP7 on [0] [ep]", "line 8: PP7 is an unknown region\n"),
        (
            TWO + "transfer send q on [0] => [1] [pp], counted: (h0) -> loss  # pass",
            "line 8: the line has more than its node\n",
        ),
        (TWO + "dag: 6 nodes, 2 regions", "line 8: the DAG begins again\n"),
        ("", "line 1: the text does not begin with `dag:`\n"),
    ],
)
def test_what_is_wrong_is_said(wrong: str, message: str) -> None:
    with pytest.raises(Refused) as refused:
        parse(dedent(wrong).strip(), chain(2))

    assert str(refused.value).startswith(message)


def test_a_dag_written_by_hand_gets_its_transfers() -> None:
    dag = parse(dedent(TWO).strip(), chain(2))
    require(dag, CAPTURED)

    after = insert_transfers(dag)

    assert text(after) == dedent("""\
        dag: 8 nodes, 2 regions
        F        PP0:F on [0]: (w:PP0, x) -> h0, saved:PP0  # capture
        F        PP1:F on [1]: (w:PP1, h0>1, y) -> loss, saved:PP1  # capture
        B        PP1:B on [1]: (w:PP1, h0>1, y, saved:PP1, seed) -> d:h0/PP1, g:PP1/PP1  # capture
        B        PP0:B on [0]: (w:PP0, x, saved:PP0, d:h0/PP1>0) -> g:PP0/PP0  # capture
        update   PP0:U on [0]: (g:PP0/PP0) -> w:PP0'  # capture
        update   PP1:U on [1]: (g:PP1/PP1) -> w:PP1'  # capture
        transfer send h0>1 on [0] => [1] [pp] {PP=1}: (h0) -> h0>1  # pass
        transfer send d:h0/PP1>0 on [1] => [0] [pp] {PP=0}: (d:h0/PP1) -> d:h0/PP1>0  # pass
        value activation (float32[2, 4]) base=h0: h0>1
        value gradient (float32[2, 4]) base=h0 region=PP1: d:h0/PP1>0
        """)


ONE = """
    dag: 3 nodes, 1 region
    F        PP0:F on [0, 1]: (w:PP0, x, y) -> loss, saved:PP0  # capture
    B        PP0:B on [0, 1]: (w:PP0, x, y, saved:PP0, seed) -> g:PP0/PP0  # capture
    update   PP0:U on [0, 1]: (g:PP0/PP0) -> w:PP0'  # capture
    buckets PP0 on [0, 1]: zero=1 message_bytes=1000 reduce_stream=dp gather_stream=dp \
gather_ahead=1 gather_buffers=2 once=True shares=1
"""


def test_a_dag_written_by_hand_shards_its_optimizer() -> None:
    dag = parse(dedent(ONE).strip(), chain(1))

    after = text(place_reductions(dag)).splitlines()

    assert after[1:6] == [
        "F        PP0:F on [0, 1]: (W:PP0, x, y) -> loss, saved:PP0  # capture",
        "B        PP0:B on [0, 1]: (W:PP0, x, y, saved:PP0, seed) -> g:PP0/PP0  # capture",
        "update   PP0:U on [0, 1]: (S:PP0/PP0) -> w:PP0'  # capture",
        "reduce-scatter reduce-scatter S:PP0/PP0 on [0, 1] [dp], messages 0: "
        "(g:PP0/PP0) -> S:PP0/PP0  # pass",
        "all-gather all-gather W:PP0 on [0, 1] [dp], messages 0: (w:PP0) -> W:PP0  # pass",
    ]


def test_a_dag_that_was_read_back_compiles_as_before() -> None:
    program = [Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=3)]
    dag = apply(program, training_dag(chain(2)))

    again = parse(text(dag), dag.model)

    assert text(run_passes(again, Costs())) == text(run_passes(dag, Costs()))
