"""Calls of operators with the arguments that torch's own tests draw for them.

Torch's table of samples (`OpInfo`) has every keyword, odd ranks, negative and empty dimensions. It
needs packages that are not installed here, so what it draws was recorded, at sizes that divide:
operator, arguments, and keywords of each call that a trace of a sample has and a rule is for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from capture.division.trials import Trial
from torch import Tensor

FILE = Path(__file__).parents[2] / "golden/operator_samples.jsonl"
HOSTILE = torch.tensor([-torch.inf, torch.inf, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)


def samples() -> list[str]:
    return FILE.read_text().splitlines()


def sampled(line: str, hostile: bool, seed: int = 0) -> Trial:
    """The call, with random numbers. Hostile ones are infinite, zero or equal in many places."""
    name, args, kwargs = json.loads(line)
    target: Any = torch.ops
    for part in name.split("."):
        target = getattr(target, part)
    draw = torch.Generator().manual_seed(seed)
    args, kwargs = (_built(one, draw, hostile) for one in (args, kwargs))
    return Trial(target, tuple(args), kwargs, blocks=(1, 2))


def _built(recorded: Any, draw: torch.Generator, hostile: bool) -> Any:
    if isinstance(recorded, list):
        return [_built(one, draw, hostile) for one in recorded]
    if not isinstance(recorded, dict):
        return recorded
    if "constant" in recorded:  # such as torch.float64
        return getattr(torch, recorded["constant"])
    if "tensor" in recorded:
        return _tensor(recorded, draw, hostile)
    return {key: _built(one, draw, hostile) for key, one in recorded.items()}


def _tensor(recorded: dict[str, Any], draw: torch.Generator, hostile: bool) -> Tensor:
    dtype, shape = getattr(torch, recorded["tensor"]), recorded["shape"]
    if "values" in recorded:  # indices and masks are as they were
        return torch.tensor(recorded["values"], dtype=dtype).reshape(shape)
    made = torch.randn(shape, generator=draw, dtype=torch.float64)
    if hostile:
        odd = HOSTILE[torch.randint(0, len(HOSTILE), shape, generator=draw)]
        made = torch.where(torch.rand(shape, generator=draw) < 0.4, odd, made)
    return made.to(dtype)
