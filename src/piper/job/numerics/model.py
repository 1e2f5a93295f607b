"""The model that both sides start from, and the memory that they need."""

from __future__ import annotations

import copy

import torch

from piper.capture import Captured
from piper.errors import InputError
from piper.ir.values import Role
from piper.job.batch.batch import Batch
from piper.job.batch.random_batches import doubled, microbatches
from piper.job.compile.compiler import Compiled
from piper.job.job import Job
from piper.job.numerics.reference import loss_of, sizes_of
from piper.plan.analyse.memory import peak
from piper.runtime.torch_private import DropoutModule

SMALLER = (
    "make the model smaller with an argument of the script: arguments after the script are passed "
    "on to it, as in `piper check train.py --numerics --layers 2`"
)


def copied(job: Job, captured: Captured) -> torch.nn.Module:
    """A copy of the model on the CPU, with its initial values."""
    try:
        model = copy.deepcopy(job.model)
    except RuntimeError as error:
        raise InputError.of(
            "model",
            f"it cannot be copied: {str(error).partition('.')[0]}",
            "keep results of computations out of the model's attributes, or detach() them",
        ) from error
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return model.cpu()
    names = list(model.named_parameters(remove_duplicate=False))
    model.to_empty(device="cpu")
    first: dict[int, torch.nn.Parameter] = {}
    for name, before in names:  # tie them again
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        setattr(owner, leaf, first.setdefault(id(before), getattr(owner, leaf)))
    used = {p.name for bucket in captured.model.buckets.values() for p in bucket.parameters}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(job.initial(name)) if name in used else tensor.zero_()
    return model


def in_double(
    model: torch.nn.Module, job: Job, batch: Batch
) -> tuple[torch.nn.Module | None, list[str]]:
    """The model in float64, if one microbatch runs in it."""
    trial = copy.deepcopy(model).double()
    try:
        loss_of(trial, job, first_microbatch(job, doubled(batch))).backward()
    except Exception as error:  # whatever it is, use the model's own type
        reason = f"{type(error).__name__} {str(error).partition(chr(10))[0]}".rstrip()
        return None, [f"not in float64, in which the model does not run: {reason}"]
    return copy.deepcopy(model).double(), []


def first_microbatch(job: Job, batch: Batch) -> Batch:
    return microbatches(batch, job.all_microbatches, sizes_of(job, batch))[0]


def without_dropout(job: Job, example: Batch) -> list[str]:
    """Switch off dropout: by p = 0, or else by eval mode."""
    for module in job.model.modules():
        if isinstance(module, DropoutModule):
            module.p = 0.0
    if not is_random(job.capture(example)):
        return ["dropout is off (p = 0): Piper's masks are not those of eager PyTorch"]
    job.model.eval()
    if not is_random(job.capture(example)):
        return ["dropout is off (eval mode): Piper's masks are not those of eager PyTorch"]
    raise InputError.of(
        "model",
        "it draws random numbers even in eval mode (noise, times, masks, dropout), and Piper draws "
        "others than eager PyTorch: the two cannot be compared",
        "give what is drawn with the batch (`noise`, `t`), or add an argument to the script that "
        "switches it off, and pass it after the script",
    )


def is_random(captured: Captured) -> bool:
    return any(value.role is Role.RANDOM for value in captured.model.values.values())


def widest(model: torch.nn.Module) -> torch.dtype:
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return min(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def refuse_large(compiled: Compiled, free: int) -> None:
    """Memory for all devices at once in float64, and for plain training."""
    peaks = sum(peak(compiled.dag, plan, compiled.optimizer).total for plan in compiled.plans)
    buckets = compiled.dag.model.buckets.values()
    model = sum(spec.nbytes for bucket in buckets for spec in bucket.specs)
    needed = 2 * (peaks + 6 * model)
    if needed > free // 2:
        half = f"half of the free memory is {free / 2**31:.1f} GiB"
        what = f"training it both ways takes about {needed / 2**30:.1f} GiB, and {half}"
        raise InputError.of("model", what, SMALLER)
