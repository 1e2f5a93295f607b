"""Costs that are no numbers would make the compiler wait for ever."""

import pytest

from piper.errors import StrategyError
from piper.ir.costs import Costs


@pytest.mark.parametrize(
    "given",
    [
        {"latency": float("nan")},
        {"flops": 0.0},
        {"link": float("inf")},
        {"memory": "fast"},
        {"compute": 5},
        {"compute": {"a F": -1.0}},
        {"streams": {"ep": 0.0}},
    ],
)
def test_what_is_no_number_is_refused(given: dict) -> None:
    with pytest.raises(StrategyError, match="costs: "):
        Costs(**given)


@pytest.mark.parametrize("text", ['{"latency": NaN}', "[1]", "{", '{"speed": 1}', '{"compute": 5}'])
def test_a_file_that_is_none_of_costs_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match="costs: "):
        Costs.from_json(text)
