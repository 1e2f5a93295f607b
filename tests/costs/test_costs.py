"""Costs that are no numbers would make the compiler wait for ever."""

import pytest

from piper.costs import Costs
from piper.costs.estimate import Work
from piper.costs.measured import Figure, RegionKey
from piper.costs.modes import Mode
from piper.errors import StrategyError
from piper.names import Phase

FIGURE = '{"figures": [{"code": "a", "phase": "F", "seconds": 1, "work": %s}]}'


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


@pytest.mark.parametrize(
    "text",
    [
        '{"latency": NaN}', "[1]", "{", '{"speed": 1}', '{"figures": 5}', '{"mode": "quick"}',
        '{"figures": [{"phase": "F", "seconds": 1}]}',
        FIGURE % '{"flops": "x", "touched": 1}',
        FIGURE % '{"flops": -1, "touched": 1}',
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_costs_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match="costs: "):
        Costs.from_json(text)


def test_a_file_keeps_every_figure() -> None:
    work = Work(1e9, 2e6, None, 12)
    figures = {
        RegionKey("a b", Phase.FORWARD, Mode.COMPILED): Figure(0.5, work, "shapes"),
        RegionKey("c", Phase.BACKWARD): Figure(1.5),
    }
    costs = Costs(figures=figures, streams={"ep": 1e9}, mode=Mode.COMPILED, ahead=True)

    assert Costs.from_json(costs.to_json()) == costs


def test_a_file_of_an_older_version_is_read() -> None:
    costs = Costs.from_json('{"compute": {"block F": 0.0021, "of experts BI": 0.5}, "link": 2e9}')

    assert costs.figures == {
        RegionKey("block", Phase.FORWARD): Figure(0.0021),
        RegionKey("of experts", Phase.BACKWARD_INPUT): Figure(0.5),
    }


def test_a_figure_without_a_phase_is_to_be_measured_again() -> None:
    with pytest.raises(StrategyError) as refused:
        Costs.from_json('{"compute": {"block": 1.0}}')

    assert str(refused.value) == (
        "costs: this is not a file of costs: 'block' is not a valid Phase\n"
        "  fix: measure again: `piper simulate train.py --profile costs.json`, or `trainer.tune`"
    )


def test_each_thing_has_a_price() -> None:
    costs = Costs(link=100.0, latency=0.5, add=1.0, square=2.0, update=3.0, streams={"ep": 10.0})

    assert (costs.message(200, "pp"), costs.message(200, "ep")) == (2.5, 20.5)
    assert (costs.addition(2), costs.norm(2), costs.optimizer(2)) == (2.0, 4.0, 6.0)
    assert costs.host.blocks and costs.host.cores is None
    assert costs.network(3).per_node == 3 and costs.network(3).inside.bandwidth == 100.0
