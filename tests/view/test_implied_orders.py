"""`piper show` says of an order whether it changes anything."""

from __future__ import annotations

import pytest
from synthetic import chain

from piper import Order, Place, Split, where
from piper.cli.show import orders_of_messages, orders_of_passes
from piper.job.compile.compiler import compile_strategy
from piper.view.reports.implied_orders import implied_orders


def said(devices: tuple[int, int], microbatches: int, *orders: Order) -> str:
    placed = [Place(where(PP=stage), [device]) for stage, device in enumerate(devices)]
    program = [*placed, Split("MB", microbatches), *orders]
    orders = orders_of_passes(program), orders_of_messages(program)
    return implied_orders(compile_strategy(chain(2), program).dag, *orders)


def passes(*named: tuple[int, int, str]) -> Order:
    return Order([where(PP=stage, MB=part, PASS=phase) for stage, part, phase in named])


FORWARD_FIRST = passes((0, 0, "F"), (0, 0, "B"))
DOWN = passes((0, 0, "F"), (1, 0, "F"))
FORCED = "the flow of data alone gives what is asked for"
FLOW = f"directive 4 of 4: the order changes nothing, as {FORCED}"
APART = (
    "directive 4 of 4: the order changes nothing, as no device has two of the passes that are "
    "ordered"
)


@pytest.mark.parametrize(
    ("devices", "order", "words"),
    [
        ((0, 1), FORWARD_FIRST, FLOW), ((0, 0), DOWN, FLOW), ((0, 1), DOWN, APART),
        ((0, 1), Order([where(PP=0, PASS="F")]), ""),
        ((0, 1), Order([where(PP=0, PASS="B"), where(PP=0, PASS="UPDATE")]), ""),
        ((0, 1), Order([where(PP=1, PASS="B"), where(PP=0, PASS="UPDATE")]), FLOW),
        ((0, 1), Order([where(PP=0, PASS="UPDATE"), where(PP=1, PASS="F", STEP=1)]), FLOW),
        ((0, 1), Order([where(PP=0, PASS="UPDATE"), where(PP=1, PASS="UPDATE")]), ""),
    ],
)  # fmt: skip
def test_an_order_that_changes_nothing_is_mentioned(
    devices: tuple[int, int], order: Order, words: str
) -> None:
    assert said(devices, 1, order) == words


def test_one_that_changes_something_is_not() -> None:
    second_first = passes((0, 1, "F"), (0, 0, "F"))
    partly = passes((0, 0, "F"), (0, 0, "B"), (0, 1, "F"), (0, 1, "B"))

    assert said((0, 1), 2, second_first) == said((0, 1), 2, partly) == ""


def test_several_are_one_line() -> None:
    both = FORWARD_FIRST, passes((1, 0, "F"), (1, 0, "B"))

    words = f"directives 4, 5 of 5: the orders change nothing, as {FORCED}"
    assert said((0, 1), 1, *both) == words
