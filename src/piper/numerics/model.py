"""The model that both sides start from, and what this machine has room for."""

from __future__ import annotations

import copy
import os
from contextlib import suppress
from pathlib import Path

import torch

from piper.capture import Captured
from piper.compiler import Compiled
from piper.errors import InputError, Problem
from piper.ir.values import Origin
from piper.numerics.data import Batch, chunk, doubled
from piper.numerics.plain import loss_of
from piper.plan.memory import peak
from piper.trainer import Trainer

SMALLER = (
    "make the script's model smaller with an argument of yours: what follows the script is passed "
    "on to it, as in `piper check train.py --numerics --layers 2`"
)


def prepared(trainer: Trainer, captured: Captured) -> tuple[torch.nn.Module, list[str]]:
    """A copy of the model on the CPU with its first values, and without dropout."""
    model = copy.deepcopy(trainer.model).to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(trainer.initial(name))
    if not any(value.origin is Origin.RANDOM for value in captured.model.values.values()):
        return model, []
    dropouts = [m for m in model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd)]
    for module in dropouts:
        module.p = 0.0
    if dropouts:
        return model, ["dropout is off (p = 0): Piper's masks are not those of eager PyTorch"]
    model.eval()
    return model, ["the model is in eval mode: it has dropout, whose masks differ by design"]


def in_double(
    model: torch.nn.Module, trainer: Trainer, batch: Batch, parts: int
) -> tuple[torch.nn.Module | None, list[str]]:
    """The model in float64, if one microbatch runs in it."""
    fine = copy.deepcopy(model).double()
    try:
        loss_of(fine, trainer, chunk(doubled(batch), 0, parts)).backward()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        return None, [f"not in float64, where the model does not run: {reason}"]
    for parameter in fine.parameters():
        parameter.grad = None
    fine.load_state_dict(model.state_dict())  # buffers may have changed
    return fine, []


def widest(model: torch.nn.Module) -> torch.dtype:
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return min(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def refuse_large(compiled: Compiled, free: int) -> None:
    """All devices are here at once, in float64, with plain training beside them."""
    peaks = sum(peak(compiled.dag, plan).total for plan in compiled.plans)
    buckets = compiled.dag.model.buckets.values()
    model = sum(spec.nbytes for bucket in buckets for spec in bucket.specs)
    needed = 2 * (peaks + 6 * model)
    if needed > free // 2:
        half = f"half of the free memory here is {free / 2**31:.1f} GiB"
        what = f"to train it here both ways takes about {needed / 2**30:.1f} GiB, and {half}"
        raise InputError("model", Problem(what, SMALLER))


def free_memory() -> int:
    """Bytes that this machine could still give."""
    with suppress(OSError):
        for row in Path("/proc/meminfo").read_text().splitlines():
            if row.startswith("MemAvailable:"):
                return int(row.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
