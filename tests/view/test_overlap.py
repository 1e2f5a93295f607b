"""What `piper show` says of slots in which several passes share a device."""

from __future__ import annotations

from collections import Counter

import pytest
from plan.expert_programs import scheduled
from synthetic import moe_chain

from piper.directives.order import Ahead
from piper.job.compile.compiler import compile_strategy
from piper.view.reports.overlap import overlapped


@pytest.mark.parametrize("ahead", [True, "pairs"])
def test_every_slot_is_told_once_and_whole(ahead: Ahead) -> None:
    """Also where its weight gradients may be late."""
    dag = compile_strategy(
        moe_chain(4, experts=2), scheduled("dualpipev", 8, 2, 2, ahead=ahead)
    ).dag

    slots = overlapped(dag)

    assert slots
    assert set(Counter(name for slot in slots for name in slot).values()) == {1}
    assert all(any(":BW@" in name for name in slot) for slot in slots)
