"""Group of bench/gpu.py: bf16 compute on fp32 masters, by ZeRO level, beside FSDP2 and others.

Everyone computes and gathers in bf16, reduces in fp32, and updates fp32 masters with AdamW. Memory
is shown by kind, bytes on the wire beside their closed form.

If the folder .peers has their packages (see bench/real_peers.py), DeepSpeed and Megatron-Core run
too. Megatron-Core reduces in bf16, its default, and so does one entry of Piper.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_memory import on_cpu, on_gpu, warm_up
from gpu_models import Data, Shelf, Whole
from gpu_peers import fsdp2
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from wire_meter import Wire

import piper
from piper.plan.analyse.memory import peak

POLICY = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
)
RESHARD = {1: False, 2: False, 3: True}  # FSDP2's way to each ZeRO level
MIB = 2**20
SITE = Path(__file__).parent.parent / ".peers"


def precision(arena: Arena) -> None:
    """All ranks are replicas; a layer is a region or a unit."""
    size, parts = arena.size, arena.chosen.microbatches or 4
    arena.dtype = torch.bfloat16  # of the tolerance: all compute in it
    model = Shelf(arena.device, torch.float32).get(size, size.layers)
    with torch.no_grad():  # DeepSpeed and Megatron-Core make masters from parameters in bf16
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    data, count = size.batch(arena.rank, parts), sum(p.numel() for p in model.parameters())
    arena.say(f"precision: {count / 1e6:.1f} M parameters, {parts} microbatches")
    warm_up(arena)
    for zero in (level for level in arena.chosen.zero if level in RESHARD):
        entry, notes = f"zero={zero}", dict[str, Any]()
        if not arena.wanted(entry):
            continue
        makers = {
            name: partial(weighed, arena, name, make, notes)
            for name, make in contenders(arena, model, data, parts, zero).items()
        }
        expected = closed_form(count, arena.world, parts, zero)
        more = {"kinds": notes, "wire_closed_form": expected, "parts": parts}
        arena.contest(entry, makers, more=more)
        arena.say(table(notes, expected))


def contenders(
    arena: Arena, model: Whole, data: Data, parts: int, zero: int
) -> dict[str, Callable[[], Contender]]:
    """Above ZeRO-1, each system reduces the gradients of each microbatch, and Piper and FSDP2 also
    those of a step at once. The first entry is Piper's default."""
    ours = partial(arena.ours, model, replicated(arena, parts, zero), data, precision="bf16")
    found: dict[str, Callable[[], Contender]] = {"piper": ours}
    if arena.on_gpu:
        found["piper graphs"] = partial(ours, graphs=True)
    peer = partial(fsdp2, arena, model, data, parts, reshard=RESHARD[zero], policy=POLICY)
    if zero == 1:  # as Megatron-Core does by default
        coarse = piper.Precision(reduce="bfloat16")
        found["piper, reduced in bf16"] = partial(ours, precision=coarse)
        found["fsdp2"] = partial(peer, each=False)
    else:
        each = replicated(arena, parts, zero, reduce="each", gather_buffers=2)
        found["piper, each"] = partial(arena.ours, model, each, data, precision="bf16")
        if zero == 3:  # as FSDP2 does it
            again = replicated(arena, parts, zero, reduce="once", gather_buffers=2)
            found["piper, 2 layers"] = partial(arena.ours, model, again, data, precision="bf16")
        found["fsdp2"] = partial(peer, each=False)
        found["fsdp2, each"] = partial(peer, each=True)
    if zero == 3:  # as DeepSpeed does by default, which keeps parameters that it soon needs again
        held = replicated(arena, parts, zero, gather_buffers=3 * arena.size.layers // 4)
        found["piper, most held"] = partial(arena.ours, model, held, data, precision="bf16")
    found |= other_systems(arena, model, data, parts, zero) if SITE.is_dir() else {}
    skip = arena.chosen.skip
    return {name: make for name, make in found.items() if not any(s in name for s in skip)}


def replicated(arena: Arena, parts: int, zero: int, **options: Any) -> list[Any]:
    """Every rank is a replica."""
    devices = list(range(arena.world))
    return [
        piper.Place(piper.where(), devices),
        piper.Replicate(piper.where(), devices, zero=zero, **options),
        piper.Split("MB", parts),
    ]


def other_systems(
    arena: Arena, model: Whole, data: Data, parts: int, zero: int
) -> dict[str, Callable[[], Contender]]:
    """DeepSpeed at every level, and Megatron-Core's distributed optimizer, which is ZeRO-1."""
    deepspeed, megatron = (imported(arena, name) for name in ("real_deepspeed", "real_megatron"))
    make = partial(deepspeed.zero, arena, model, data, parts, zero, master=True)
    found: dict[str, Callable[[], Contender]] = {"deepspeed": make}
    if zero == 1:
        rounded = Shelf(arena.device, torch.bfloat16).get(arena.size, 1)
        way = megatron.Way(1, sharded=True)
        found["megatron"] = partial(megatron.megatron, arena, rounded, arena.size, parts, way)
    return found


def imported(arena: Arena, name: str) -> Any:
    """A module of this folder that uses packages of the folder .peers."""
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    os.environ |= {"DS_BUILD_OPS": "0", "DS_SKIP_CUDA_CHECK": "1"}
    os.environ |= {"DS_ACCELERATOR": arena.device.type}
    if arena.on_gpu:  # all ranks share it
        os.environ["LOCAL_RANK"] = "0"
    return importlib.import_module(name)


def weighed(
    arena: Arena, name: str, make: Callable[[], Contender], notes: dict[str, Any]
) -> Contender:
    """Made, with notes on its memory and its messages after the steps whose losses are compared."""
    arena.clean()
    before = torch.cuda.memory_allocated() if arena.on_gpu else 0
    one = make()
    arena.losses(one)
    held = {kind: arena.most(size) for kind, size in kinds(one).items()}
    most = arena.most(on_gpu(arena, one, before) if arena.on_gpu else on_cpu(one))
    after = arena.most(torch.cuda.memory_allocated() - before if arena.on_gpu else 0)
    held["the rest at the peak"] = most - sum(held.values())
    note = {"held": held, "peak": most, "between steps": after, "wire": sent(one)}
    if one.trainer is not None:
        note["computed"] = arena.most(computed(one.trainer, staging=0 if arena.on_gpu else 1))
    notes[name] = note
    return one


def kinds(one: Contender) -> dict[str, int]:
    """Bytes on this rank that outlive a step."""
    if one.trainer is None and not one.parameters:
        return {}  # only it knows
    if one.trainer is None:
        states_of_all = nbytes(states(one.optimizers))
        return {"parameters": 0, "masters": nbytes(one.parameters), "optimizer": states_of_all}
    buckets = list(one.trainer._programs.state.buckets.values())
    wide = [bucket for bucket in buckets if bucket.optimizer is not None]
    masters = [master for bucket in wide for master in bucket.parameters]
    optimizers = [bucket.optimizer for bucket in buckets if bucket.optimizer is not None]
    held = [tensor for bucket in buckets for tensor in bucket.tensors]
    return {
        "parameters": nbytes([*held, *masters]) - nbytes(masters),
        "masters": nbytes(masters),
        "optimizer": nbytes(states(optimizers)),
    }


def states(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    rows = [row for one in optimizers for row in one.state.values()]
    return [value for row in rows for value in row.values() if isinstance(value, Tensor)]


def nbytes(tensors: list[Tensor]) -> int:
    """Of the local parts of DTensors; what shares memory counts once."""
    local = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in local}.values())


def sent(one: Contender) -> int:
    """Bytes that this rank sends in a step: from the plan, or counted as a peer sends them."""
    if one.trainer is not None:
        (program,) = one.trainer._programs.ready.values()
        return sum(instruction.sent for instruction in program.plan.instructions)
    with Wire() as wire:
        one.step()
    return wire.sent


def computed(trainer: piper.Trainer, staging: int) -> float:
    made = [(one.dag, plan) for one in trainer._programs.made.values() for plan in one.plans]
    return max((peak(dag, plan, staging=staging).total for dag, plan in made), default=0.0)


def closed_form(count: int, replicas: int, parts: int, zero: int) -> float:
    """Gathers of 2 bytes and reductions of 4, around a ring, if each microbatch is reduced."""
    gathers, reductions = {1: (1, 1), 2: (1, parts), 3: (2 * parts, parts)}[zero]
    return count * (2 * gathers + 4 * reductions) * (replicas - 1) / replicas


def table(notes: Mapping[str, Any], expected: float) -> str:
    rows = [f"  on the wire by closed form: {expected / MIB:.1f} MiB"]
    for name, one in notes.items():
        held = ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in one["held"].items())
        far = f" (computed {one['computed'] / MIB:.1f})" if "computed" in one else ""
        rows.append(
            f"  {name:22} peak {one['peak'] / MIB:8.1f} MiB{far}: {held}; between steps "
            f"{one['between steps'] / MIB:.1f}; wire {one['wire'] / MIB:.1f}"
        )
    return "\n".join(rows)
