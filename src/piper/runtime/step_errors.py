"""Errors of a step: which instruction failed, and why; if memory ran out, what held it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from piper.errors import RunError, is_out_of_memory
from piper.plan.instructions import Load, Plan, Run, line
from piper.runtime.index_errors import has_wrong_index, index_text
from piper.runtime.processes.waits import lost
from piper.runtime.torch_private import pytree

OTHER_TYPE = "give class labels as int64 (y.long()), and other tensors in the types of the example"
TYPED = re.compile(r"expected .*(dtype|scalar type)|should have the same dtype", re.IGNORECASE)
LARGEST = 3  # buffers that are named


def step_error(
    plan: Plan, position: int, error: Exception, held: Mapping[str, Any], names: Sequence[str]
) -> RunError:
    """An error that names the instruction. A lost peer is not this device's own failure.

    `held` are the buffers of the plan at that moment, by name; `names` those of the tensors of the
    batch, as the user calls them.
    """
    where, reason = line(plan.instructions[position]), f"{type(error).__name__}: {error}"
    if isinstance(error, ConnectionError):
        return lost(plan.device, where, reason)
    if is_out_of_memory(error):
        states = {state.value for state in plan.states}
        reason = f"out of memory: {held_text(held, states)}\n  {reason}"
    elif has_wrong_index(error):
        text = index_text(error, list(given(plan, position, held, names)))
        reason += f"\n  {text}" if text else ""
    elif isinstance(error, RuntimeError) and TYPED.search(str(error)):
        batch = given(plan, position, held, names)
        types = (f"{name} is {one.dtype}" for name, one in batch)
        reason += f"\n  of the batch, {', '.join(types)} here\n  fix: {OTHER_TYPE}"
    return RunError(plan.device, where, reason)


def given(
    plan: Plan, position: int, held: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the batch that a region reads, by name."""
    run, loads = plan.instructions[position], plan.instructions
    read = set(run.reads) if isinstance(run, Run) else set()
    for load in (one for one in loads if isinstance(one, Load) and one.role == "batch"):
        tensor = held.get(load.value) if load.value in read else None
        if isinstance(tensor, torch.Tensor):
            yield names[load.index], tensor


def held_text(held: Mapping[str, Any], states: set[str]) -> str:
    """
    >>> held_text({"w": torch.zeros(2**18), "h0": (torch.zeros(2**19),), "h1": None}, {"w"})
    'the step holds 1.0 MiB of parameters and 2.0 MiB in 1 buffer (h0: 2.0 MiB)'
    """
    sizes = {name: total_bytes(value) for name, value in held.items() if value is not None}
    parameters = sum(size for name, size in sizes.items() if name in states)
    rest = sorted(((n, s) for n, s in sizes.items() if n not in states), key=lambda one: -one[1])
    named = ", ".join(f"{name}: {mebibytes(size)}" for name, size in rest[:LARGEST])
    buffers = f"{len(rest)} buffer" + ("s" if len(rest) != 1 else "")
    text = f"{mebibytes(sum(size for _, size in rest))} in {buffers} ({named})" if rest else "none"
    return f"the step holds {mebibytes(parameters)} of parameters and {text}"


def total_bytes(value: Any) -> int:
    tensors: Sequence[Any] = pytree.tree_leaves(value)
    return sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
