"""The memory that one device has, and what a compiled strategy needs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from piper.errors import InputError
from piper.job.compile.compiler import Compiled
from piper.names import Device
from piper.plan.analyse.mailbox_sizes import mailbox_sizes
from piper.plan.analyse.memory import peak
from piper.plan.analyse.required_communicators import token_bytes
from piper.plan.instructions import Plan
from piper.runtime.comm.shared_gpu.mailboxes import are_used
from piper.runtime.comm.shared_gpu.shared_rows import group_bytes
from piper.runtime.hardware import gpu_memory
from piper.runtime.optimizers.known_optimizers import MakeOptimizer

GIB = 2**30
ADAM = 2.0  # times the parameters
USABLE = 0.9  # of the memory of a GPU


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes of one device, and what plans do not say of the bytes that they need."""

    bytes: int
    is_given: bool = True  # by the user, so that a strategy that needs more is an error
    optimizer: float = ADAM  # size of its state, in multiples of the parameters
    staging: int = 1  # whole gradients that a reduce-scatter copies: gloo 1, NCCL 0
    shared: tuple[bool, bool] = (False, False)  # links, token all-to-alls: whether through memory

    @property
    def usable(self) -> int:
        """For choices of the compiler. A GPU also holds contexts, communicators and fragments."""
        return self.bytes if self.is_given else int(USABLE * self.bytes)

    def peaks(self, compiled: Compiled) -> dict[Device, int]:
        """The peak of each device, or of one device of each role."""
        dag, first = compiled.dag, set(compiled.roles.of.values())
        plans = [plan for plan in compiled.plans if plan.device in first]
        rest = self.optimizer, self.staging
        return {
            plan.device: peak(dag, plan, *rest).total + self.message_memory(plan) for plan in plans
        }

    def message_memory(self, plan: Plan) -> int:
        """What processes that share a GPU set aside for messages of others."""
        links, tokens = self.shared
        boxes = mailbox_sizes(plan).values() if links else ()
        groups = token_bytes(plan).items() if tokens else ()
        return sum(box.slots * box.slot_bytes for box in boxes) + sum(
            group_bytes(team, size) for team, size in groups
        )


def memory_limit(
    device: torch.device, given: Iterable[float | None], optimizer: Callable[[], float]
) -> MemoryLimit | None:
    """The smallest limit that the user gave in GiB, or else the memory of a GPU."""
    wanted = [gib for gib in given if gib is not None]
    staging = 0 if device.type == "cuda" else 1
    shared = are_used(), are_used(for_tokens=True)
    if wanted:
        return MemoryLimit(int(min(wanted) * GIB), True, optimizer(), staging, shared)
    found = gpu_memory(device)
    return MemoryLimit(found, False, optimizer(), staging, shared) if found else None


def require_limit(limit: MemoryLimit | None) -> MemoryLimit:
    if limit is None:
        what = 'keep="auto" (remat="auto") needs the memory of a device, unknown on a CPU'
        fix = "write Trainer(memory_gib=80), or Remat(where(), memory_gib=80)"
        raise InputError.of("remat", what, fix)
    return limit


def fullest(peaks: Mapping[Device, int]) -> tuple[Device, int]:
    """The device with the highest peak, and its peak."""
    return max(peaks.items(), key=lambda found: found[1])


def optimizer_state(make: MakeOptimizer, averages: bool = False) -> float:
    """The size of an optimizer's state, in multiples of the parameters, from a step on a small one.

    An optimizer that does not take that step is assumed to be like Adam. `averages` of the weights
    are as large as the weights.
    """
    return state_of_a_step(make) + (1.0 if averages else 0.0)


def state_of_a_step(make: MakeOptimizer) -> float:
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.zeros(8, 8)
    try:
        optimizer = make([("weight", parameter)])
        optimizer.step()
        tensors = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]
        return float(sum(one.nbytes for one in tensors if one.numel() > 1) / parameter.nbytes)
    except Exception:  # whatever a user's optimizer raises
        return ADAM
