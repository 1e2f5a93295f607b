"""All processes must have the same plans and the same first parameters, or nothing is exact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from piper.errors import InputError, Problem, StrategyError
from piper.plan.instructions import Plan
from piper.plan.serial import to_json

SAMPLE = 1024  # elements of each parameter that are compared: enough to tell two random ones apart
Digests = dict[str, str]


def refuse_disagreement(plans: Sequence[Plan], model: torch.nn.Module) -> None:
    """Compare with the first process what every process compiled and was given."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = {"": digest(to_json(plan).encode() for plan in plans), **digests(model)}
    everyone: list[Digests] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        different = [name for name, found in everyone[0].items() if theirs.get(name) != found]
        if different:
            raise disagreement(rank, different[0])


def digests(model: torch.nn.Module) -> Digests:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: digest([sample(tensor)]) for name, tensor in named if not tensor.is_meta}


def sample(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().flatten()
    some = flat[:: max(1, flat.numel() // SAMPLE)].to("cpu", torch.float64, copy=True)
    return f"{tuple(tensor.shape)}{tensor.dtype}".encode() + bytes(some.view(torch.uint8).tolist())


def digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def disagreement(rank: int, name: str) -> Exception:
    if not name:
        return StrategyError(
            "strategy",
            Problem(
                f"devices 0 and {rank} compiled different plans",
                "let every process build the same model, strategy and example",
            ),
        )
    return InputError(
        "model",
        Problem(
            f"{name} starts with other values on device {rank} than on device 0",
            "call torch.manual_seed(...) before the model is built, or load a checkpoint",
        ),
    )
