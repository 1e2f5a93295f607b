"""Names that are almost right get the right one, in Python as on the command line."""

import pytest

import piper
from piper.errors import StrategyError
from piper.strategies import BUILDERS, from_orders


def test_an_attribute_of_a_trainer() -> None:
    with pytest.raises(AttributeError, match="no attribute 'setp'; did you mean step?"):
        piper.Trainer.__new__(piper.Trainer).setp  # noqa: B018


def test_a_builder() -> None:
    with pytest.raises(AttributeError, match="did you mean one_f_one_b"):
        piper.strategies.one_f_one  # noqa: B018


@pytest.mark.parametrize("name", ["1fb1", "zero-bubble", "ScheduleZBVZeroBubble"])
def test_a_schedule_by_its_name(name: str) -> None:
    with pytest.raises(StrategyError, match="did you mean"):
        BUILDERS[name]
    with pytest.raises(KeyError):
        BUILDERS[name]
    assert BUILDERS.get(name) is None and name not in BUILDERS


def test_orders_say_how_many_microbatches_there_are() -> None:
    with pytest.raises(StrategyError, match="leave it out: its orders or tables say how many"):
        from_orders([], microbatches=3)  # type: ignore[call-arg]
