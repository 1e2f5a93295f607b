"""Optimizers that look at several parameters at once, which separate buckets do not allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from piper.errors import StrategyError

Named = list[tuple[str, torch.nn.Parameter]]
Make = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
SCALES = (1e3, 1.0, 1e-3)  # of gradients, one step each: reveals clipping by a norm


def refuse_joint(make: Make, optimizer: torch.optim.Optimizer, named: Named) -> None:
    """Try an optimizer that is not torch's on two small parameters: together, and one by one.

    If it cannot be tried on them, assume that it is fine.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") or getattr(kind, "elementwise", False):
        return
    names = [(name, parameter.dim()) for name, parameter in named][:2]
    names += [(f"{names[0][0]}_again", names[0][1])] if len(names) == 1 else []
    try:
        together, alone = trained(make, [names]), trained(make, [[one] for one in names])
    except Exception:
        return
    pairs = zip(together, alone, strict=True)
    if any(not torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs):
        raise StrategyError.of(
            "optimizer",
            f"{kind.__name__} updates parameters together differently than one by one, and "
            "every bucket of parameters has its own optimizer",
            "look at one parameter at a time; to clip by the norm of all gradients, give "
            "Trainer(max_norm=...)",
        )


def trained(make: Make, groups: list[list[tuple[str, int]]]) -> list[torch.Tensor]:
    """Small parameters after a few steps, with an optimizer for each group."""
    draw = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        made = [
            [(name, torch.nn.Parameter(torch.randn([2] * dims, generator=draw)))
             for name, dims in group]
            for group in groups
        ]  # fmt: skip
        optimizers = [make(list(group)) for group in made]
    flat = [parameter for group in made for _, parameter in group]
    for scale in SCALES:
        for parameter in flat:
            parameter.grad = scale * torch.randn(parameter.shape, generator=draw)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in flat]
