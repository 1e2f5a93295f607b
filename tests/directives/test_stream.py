"""Stream: what a stream gets of a GPU, from the strategy to the plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic import chain, moe_chain

from piper.directives import Place, Split, Strategy, Stream
from piper.errors import DirectiveError, PassError, Refused, StrategyError
from piper.ir.filters import where
from piper.ir.text.text import text
from piper.job.compile.compiler import compile_strategy
from piper.names import Share
from piper.plan.serialization import from_json, to_json
from piper.strategies import dualpipev

TWO = [Place(where(PP=0), [0]), Place(where(PP=1), [1]), Split("MB", 2)]
EP, COMPUTE = Stream("ep", sms=20, priority="high"), Stream("compute", sms=112)
SHARES = (Share("ep", 20, "high"), Share("compute", 112))


def divided() -> Strategy:
    return dualpipev(pp=2, dp=2, ep=2, zero=2, microbatches=4) + EP + COMPUTE


# What becomes of it


def test_every_plan_says_what_its_streams_get() -> None:
    found = compile_strategy(moe_chain(4), divided().directives)

    assert found.dag.streams == SHARES
    assert {plan.streams for plan in found.plans} == {SHARES}


def test_a_share_changes_nothing_else() -> None:
    strategy = divided()
    plain = compile_strategy(moe_chain(4), strategy.directives[:-2])

    found = compile_strategy(moe_chain(4), strategy.directives)

    assert tuple(replace(plan, streams=()) for plan in found.plans) == plain.plans


def test_it_may_stand_anywhere() -> None:
    pp = Stream("pp", priority="high")

    first, last = compile_strategy(chain(2), [pp, *TWO]), compile_strategy(chain(2), [*TWO, pp])

    assert first.plans == last.plans
    assert first.plans[0].streams == (Share("pp", None, "high"),)


def test_dag_and_plans_print_it() -> None:
    found = compile_strategy(moe_chain(4), divided().directives)

    assert text(found.dag).splitlines()[1] == "streams: ep (20 SMs, high), compute (112 SMs)"
    head = str(found.plans[0]).splitlines()[0]
    assert head == "device 0, ep (20 SMs, high), compute (112 SMs)"


def test_a_stream_without_a_share_is_only_a_name() -> None:
    assert [str(s) for s in (Share("pp"), Share("pp", 1), Share("pp", priority="high"))] == [
        "pp", "pp (1 SM)", "pp (high)",
    ]  # fmt: skip


def test_a_plan_with_shares_survives_the_way_through_json() -> None:
    plans = compile_strategy(moe_chain(4), divided().directives).plans

    assert tuple(from_json(to_json(plan)) for plan in plans) == plans


def test_plans_without_shares_do_not_mention_them() -> None:
    (plan, *_) = compile_strategy(chain(2), TWO).plans

    assert "streams" not in to_json(plan)


def test_it_is_one_line_of_json() -> None:
    strategy = Strategy([EP])

    assert strategy.to_json() == (
        '[\n  {"op": "stream", "name": "ep", "sms": 20, "priority": "high"}\n]\n'
    )
    assert Strategy.from_json('[{"op": "stream", "name": "pp"}]') == Strategy([Stream("pp")])


# What is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": ""}, "stream '' is not a name\n  fix: write Stream(\"ep\", sms=20)"),
        (
            {"name": "ep", "sms": 0},
            "sms=0 is not a number of SMs\n"
            "  fix: write 1 or more, or leave it out: the stream may then use all SMs",
        ),
        (
            {"name": "ep", "sms": True},
            "sms=True is not a number of SMs\n"
            "  fix: write 1 or more, or leave it out: the stream may then use all SMs",
        ),
        (
            {"name": "ep", "priority": "low"},
            '\'low\' is not a priority\n  fix: write "normal" or "high"',
        ),
        (
            {"name": "compute", "sms": 8, "priority": "high"},
            "CUDA cannot give the compute stream both a number of SMs and a priority\n"
            '  fix: leave out sms or priority="high"; other streams may have both',
        ),
    ],
)
def test_what_no_gpu_can_give_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        Stream(**given)

    assert str(refused.value) == message


def test_json_that_asks_for_the_impossible_names_its_line() -> None:
    with pytest.raises(StrategyError) as refused:
        Strategy.from_json('[{"op": "stream", "name": "ep", "sms": -1}]')

    assert str(refused.value).startswith("stream (directive 1): sms=-1 is not a number of SMs")


def test_a_stream_that_is_named_twice_is_refused() -> None:
    with pytest.raises(DirectiveError) as refused:
        compile_strategy(chain(2), [*TWO, Stream("pp", 4), Stream("pp", 8)])

    assert str(refused.value) == (
        "stream (directive 5 of 5): the stream 'pp' already has a share: pp (4 SMs)\n"
        "  fix: name each stream in exactly one `Stream`"
    )


def test_a_stream_that_nothing_uses_is_refused() -> None:
    """Here nothing is replicated: only the strategy as a whole says so."""
    with pytest.raises(PassError) as refused:
        compile_strategy(chain(2), [Stream("dp", 4), *TWO])

    assert str(refused.value) == (
        "streams: nothing runs on the stream 'dp', which has a share of the GPU\n"
        "  fix: name one of compute, pp, or leave this `Stream` out"
    )


def test_streams_of_gathers_are_known_in_the_end() -> None:
    """They are put in by the last pass that puts anything in."""
    gather = Stream("gather", priority="high")
    strategy = dualpipev(pp=2, dp=2, zero=3, microbatches=4) + gather

    assert compile_strategy(chain(4), strategy.directives).plans[0].streams == (gather.share,)
