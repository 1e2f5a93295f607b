"""Values whose size depends on the data go from stage to stage, however receives are ordered."""

import dynamic
import pytest
import torch
from pool import run_on

from piper.plan.analyse.required_communicators import role_meetings
from piper.plan.binding import RolePlan
from piper.plan.instructions import Plan, Send
from piper.strategies import BUILDERS


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_sizes_that_depend_on_data_cross_devices(schedule: str) -> None:
    strategy = BUILDERS[schedule](pp=2, microbatches=dynamic.PARTS).to_json()

    (losses, whole), _ = run_on(2, dynamic.train, strategy)

    wanted, parameters = dynamic.plain()
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert whole is not None
    torch.testing.assert_close(whole, dict(parameters))


def test_messages_of_a_link_come_in_order_whatever_their_sizes() -> None:
    _, got = run_on(2, dynamic.converse)

    torch.testing.assert_close(got, list(dynamic.SENT))


def test_where_sizes_come_first_a_courier_receives() -> None:
    fixed = Send("a", "x", (((2, 4), "float32"),), 1, "pp")
    loose = Send("b", "y", (((2,), "int64"), ((None, 4), "float32")), 2, "pp")

    plans = [Plan(1, (), (fixed,)), Plan(0, (), (fixed, loose))]
    found = role_meetings([RolePlan(plan, (), (), ()) for plan in plans])

    assert found.links == (("pp", 0, 1), ("pp", 0, 2), ("pp", 1, 1))
    assert found.dynamic_links == (("pp", 0, 2),)
