"""A job on the clock takes as long when only one device of each role is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from draws import one_of
from synthetic import chain, moe_chain

from piper.costs import Costs
from piper.costs.links import Link, Network
from piper.ir.model import Model
from piper.job.compile.compiler import compile_strategy
from piper.job.compile.pricing import price
from piper.strategies import BUILDERS

PORTS = Network(4, Link(200.0, 0.01), Link(100.0, 0.02))
SHARED = replace(PORTS, uplink=Link(300.0), spine=Link(900.0))


@one_of(3)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("name", "model", "options", "network"),
    [
        ("1f1b", chain(2), {"dp": 4}, SHARED),
        ("zbv", chain(4), {"dp": 4, "zero": 2}, SHARED),
        ("dualpipe", chain(2), {"dp": 4}, SHARED),
        ("dualpipev", moe_chain(4), {"dp": 4, "ep": 2, "zero": 1}, PORTS),
        ("dualpipev", moe_chain(4), {"dp": 8, "ep": 4, "zero": 3}, PORTS),
    ],
)
def test_one_of_each_role_is_enough(
    name: str, model: Model, options: dict[str, Any], network: Network, ahead: bool
) -> None:
    """Exactly, but where different kinds of messages share the way out of a node."""
    strategy = BUILDERS[name](pp=2, microbatches=4, **options).directives
    whole, few = (compile_strategy(model, strategy, by_role=by_role) for by_role in (False, True))
    costs = Costs(ahead=ahead)

    assert len(few.plans) == 2
    assert price(few, costs, network).seconds == pytest.approx(
        price(whole, costs, network).seconds, rel=1e-6
    )
