"""The options of a Trainer with their types, for functions that pass them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from piper.capture import Precision
from piper.costs import Costs
from piper.job.loop.metric_log import Log
from piper.job.loop.on_nan import OnNan
from piper.job.options import GraphsOption
from piper.runtime.optimizers.known_optimizers import MakeOptimizer, MakeScheduler
from piper.runtime.state.initial_values import Init


class TrainerOptions(TypedDict, total=False):
    """What `Trainer` takes besides model, loss, strategy and example. docs/trainer.md has each."""

    optimizer: MakeOptimizer
    lr_scheduler: MakeScheduler | None
    no_decay: Sequence[str]
    reduction: Literal["mean", "sum"] | None
    loss_weight: Callable[..., Any] | None
    max_norm: float | None
    ema: float | None
    on_nan: OnNan | None
    precision: Precision | str | None
    compiled: bool
    graphs: GraphsOption
    seed: int
    init: Init | None
    costs: Costs | str | Path | None
    memory_gib: float | None
    device: str | torch.device | None
    log: Log
    max_programs: int
    whole: Sequence[str] | None
    timeout: float
