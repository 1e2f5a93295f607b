"""Mixed precision for on_gpus.py: against a plain loop with masters, and to the bit with remat or
offload.

Every case trains a small Llama on one device, a pipeline of two, or two replicas of it at each
level of ZeRO, whatever the number of processes is.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import torch
from features import ADAMW, PARTS, ROWS, clip, far, llama, tokens
from shared_capture import using
from torch import Tensor, nn

import piper
from piper import LossScale, Precision
from piper.capture import Captured, capture
from piper.models.llama import cross_entropy

PRECISIONS = {
    "bfloat16": Precision(),
    # It overflows at first, backs off, and grows again.
    "float16": Precision(compute="fp16", loss_scale=LossScale(init=2.0**22, interval=2)),
}
STEPS = {"bfloat16": 3, "float16": 8}
LIMITS = {"bfloat16": 2e-2, "float16": 5e-3}
MAX_NORM = 0.5
ALL = ("activations", "optimizer", "parameters")
CHANGES: dict[str, dict[str, Any]] = {
    "remat": {"remat": True},
    "parameters offloaded": {"offload": ("parameters",)},
    "all offloaded": {"offload": ALL},
    "remat, all offloaded": {"remat": "matmuls", "offload": ALL},
}
Steps = list[tuple[float, float]]  # loss and norm
Found = tuple[Steps, dict[str, Tensor] | None, int]  # and parameters on the first device, parts


def names(world: int) -> list[str]:
    levels = range(4) if world == 4 else (0,)
    return [f"{dtype} zero={zero}" for dtype in PRECISIONS for zero in levels]


@functools.cache
def captured(dtype: str, device: str) -> Captured:
    example = tuple(tokens(ROWS)[0])
    return capture(llama(), cross_entropy, example, device, (), PRECISIONS[dtype])


def batches(dtype: str, rows: int) -> Any:
    return tokens(rows, lengths=(16,) * STEPS[dtype])


def trained(dtype: str, world: int, zero: int, device: str, how: Any, change: Any) -> Found:
    dp = max(1, world // 2)
    keep = {"dp": dp, "zero": zero} if dp > 1 else {}
    strategy = piper.strategies.gpipe(pp=min(world, 2), microbatches=PARTS, **keep, **change)
    rows, first = PARTS * ROWS, os.environ.get("RANK", "0") == "0"
    with using(captured(dtype, device) if first and not how["compiled"] else None):
        trainer = piper.Trainer(
            llama(), cross_entropy, strategy, optimizer=ADAMW, device=device, max_norm=MAX_NORM,
            example=tuple(tokens(rows)[0]), precision=PRECISIONS[dtype], **how,
        )  # fmt: skip
    start, seen = rows * trainer.replica, []
    for batch in batches(dtype, rows * trainer.replicas):
        metrics = trainer.step(*(tensor[start : start + rows] for tensor in batch))
        seen.append((metrics.loss, metrics.grad_norm))
    whole = trainer.state_dict()
    trainer.close()
    return seen, whole, PARTS * trainer.replicas


def by_hand(dtype: str, parts: int, device: str) -> tuple[Steps, dict[str, Tensor]]:
    """Masters, copies of them in the compute type, and torch's GradScaler."""
    model, compute, scale = llama().to(device), getattr(torch, dtype), PRECISIONS[dtype].loss_scale
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    optimizer, seen = ADAMW(list(masters.items())), []
    known = {} if scale is None else {"init_scale": scale.init, "growth_interval": scale.interval}
    scaler = torch.amp.GradScaler(device, enabled=scale is not None, **known)
    for inputs, labels in batches(dtype, parts * ROWS):
        loss = 0.0
        for some, wanted in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
            copies = {n: m.detach().to(compute).requires_grad_() for n, m in masters.items()}
            found = torch.func.functional_call(model, copies, (some.to(device),))
            one = cross_entropy(found.float(), wanted.to(device)) / parts
            scaler.scale(one).backward()
            loss += one.item()
            for name, copy in copies.items():
                grad, old = copy.grad.float(), masters[name].grad  # type: ignore[union-attr]
                masters[name].grad = grad if old is None else old + grad
        scaler.unscale_(optimizer) if scale else None
        grads = [m.grad for m in masters.values() if m.grad is not None]
        norm = torch.stack([grad.double().norm() for grad in grads]).norm().item()
        clip(grads, norm, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((loss, norm))
    return seen, {name: master.detach().cpu() for name, master in masters.items()}


def compared(name: str, world: int, device: str, **how: Any) -> dict[str, float]:
    """How far Piper is from the loop, as a share of what is allowed; 0 or 1 for equal bits."""
    dtype, level = name.split(" zero=")
    given = dtype, world, int(level), device, how
    seen, whole, parts = kept = trained(*given, {})
    wanted, masters = by_hand(dtype, parts, device)
    skips = [not math.isfinite(norm) for _, norm in wanted]
    assert any(skips) == (dtype == "float16") and not all(skips), "the scale must change"
    pairs = [(a, b) for a, b in zip(seen, wanted, strict=True) if math.isfinite(b[1])]
    errors = {
        "skipped": float([not math.isfinite(norm) for _, norm in seen] != skips),
        "loss": max(far(a[0], b[0]) for a, b in pairs) / LIMITS[dtype],
        "norm": max(far(a[1], b[1]) for a, b in pairs) / LIMITS[dtype],
    }
    if whole is not None:
        off = (far_off(whole[n], master) for n, master in masters.items())
        errors["parameters"] = max(off) / LIMITS[dtype]
    for what, change in CHANGES.items() if not how["compiled"] else ():
        errors[f"bits: {what}"] = float(not same(trained(*given, change), kept))
    return errors


def far_off(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-9)).item()


def same(one: Found, other: Found) -> bool:
    (seen, whole, _), (others, rest, _) = one, other
    return repr(seen) == repr(others) and all(torch.equal(whole[n], rest[n]) for n in whole or ())
