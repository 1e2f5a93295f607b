"""Costs that are no numbers would make the compiler wait for ever."""

import pytest

from piper.costs import Costs
from piper.costs.measured import Figure, RegionKey
from piper.errors import StrategyError
from piper.names import Phase


@pytest.mark.parametrize(
    "given",
    [
        {"latency": float("nan")},
        {"flops": 0.0},
        {"link": float("inf")},
        {"memory": "fast"},
        {"figures": 5},
        {"figures": {RegionKey("a", Phase.FORWARD): Figure(-1.0)}},
        {"streams": {"ep": 0.0}},
    ],
)
def test_what_is_no_number_is_refused(given: dict) -> None:
    with pytest.raises(StrategyError, match="costs: "):
        Costs(**given)


@pytest.mark.parametrize("text", ['{"latency": NaN}', "[1]", "{", '{"speed": 1}', '{"figures": 5}'])
def test_a_file_that_is_none_of_costs_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match="costs: "):
        Costs.from_json(text)
