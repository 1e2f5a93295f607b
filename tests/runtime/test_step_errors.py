"""An error of a step says what failed, and if memory ran out, what held it."""

from __future__ import annotations

import pytest
import torch

from piper.errors import PeerLost, RunError
from piper.plan.instructions import Plan, Run, State
from piper.runtime.step_errors import step_error

PLAN = Plan(1, (State("w:PP0", "PP0", True),), (Run("PP0:F@0", "PP0", "F", ("w:PP0",), ("h0",)),))
HELD = {"w:PP0": (torch.zeros(2**18),), "h0": torch.zeros(2**19), "h1": None}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "another cpu", "python"],
)
def test_out_of_memory_says_so_and_what_was_held(error: Exception) -> None:
    found = step_error(PLAN, 0, error, HELD, ())

    assert str(found).startswith(
        "device 1 stopped at run PP0:F@0 (w:PP0) -> h0\n  out of memory: the step holds "
        f"1.0 MiB of parameters and 2.0 MiB in 1 buffer (h0: 2.0 MiB)\n  {type(error).__name__}: "
    )


def test_other_errors_say_nothing_of_memory() -> None:
    assert "memory" not in str(step_error(PLAN, 0, IndexError("out of range"), HELD, ()))
    assert isinstance(step_error(PLAN, 0, ConnectionError("closed"), HELD, ()), PeerLost)
    assert not isinstance(step_error(PLAN, 0, IndexError("out of range"), HELD, ()), PeerLost)
    assert isinstance(step_error(PLAN, 0, IndexError("out of range"), HELD, ()), RunError)
