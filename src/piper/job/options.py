"""The options of a Trainer or rehearsal, besides model, loss and strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from piper.capture import Precision
from piper.capture.precision import precision_of
from piper.costs import Costs
from piper.job.arguments import (
    refuse_wrong_count,
    refuse_wrong_ema,
    refuse_wrong_graphs,
    refuse_wrong_memory,
    refuse_wrong_options,
)
from piper.job.batch.user_weights import Weight
from piper.job.loop.on_nan import OnNan, refuse_wrong_on_nan
from piper.job.loss.loss_reduction import Reduction
from piper.job.option_kinds import refuse_wrong_kinds
from piper.runtime.optimizers.kept_optimizers import noted
from piper.runtime.optimizers.known_optimizers import MakeOptimizer, MakeScheduler
from piper.runtime.optimizers.parameter_groups import WithoutDecay
from piper.runtime.optimizers.whole_options import is_plain
from piper.runtime.state.initial_values import Init

Loss = Callable[..., torch.Tensor]  # of the model's output and the last argument of a step
GraphsOption = bool | Literal["auto"]  # whether regions run as CUDA graphs
ADAMW = partial(torch.optim.AdamW, lr=3e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options as the user gives them. docs/trainer.md explains each."""

    optimizer: MakeOptimizer = ADAMW
    lr_scheduler: MakeScheduler | None = None
    no_decay: Sequence[str] = ()
    reduction: Reduction | None = None
    loss_weight: Weight | None = None
    max_norm: float | None = None
    ema: float | None = None
    on_nan: OnNan | None = None
    precision: Precision | str | None = None
    compiled: bool = False
    graphs: GraphsOption = "auto"
    seed: int = 0
    init: Init | None = None
    costs: Costs | str | Path | None = None
    memory_gib: float | None = None
    device: str | torch.device | None = None
    max_programs: int = 64
    whole: Sequence[str] | None = None

    def __post_init__(self) -> None:
        refuse_wrong_options(self.optimizer, self.lr_scheduler, self.max_norm)
        refuse_wrong_kinds(
            seed=self.seed, compiled=self.compiled, init=self.init, costs=self.costs,
            no_decay=self.no_decay, whole=self.whole,
        )  # fmt: skip
        refuse_wrong_ema(self.ema)
        if not is_plain(self.optimizer):
            object.__setattr__(self, "optimizer", noted(self.optimizer))
        if self.no_decay and not isinstance(self.optimizer, WithoutDecay):
            grouped = WithoutDecay(self.optimizer, tuple(self.no_decay))
            object.__setattr__(self, "optimizer", grouped)
        refuse_wrong_graphs(self.graphs)
        refuse_wrong_on_nan(self.on_nan, self.graphs is True, self.scales_loss)
        refuse_wrong_memory(self.memory_gib)
        refuse_wrong_count("max_programs", self.max_programs)

    @property
    def says_reduction(self) -> bool:
        """Whether the user says how the losses of microbatches are put together."""
        return self.reduction is not None or self.loss_weight is not None

    @property
    def scales_loss(self) -> bool:
        precision = precision_of(self.precision)
        return precision is not None and precision.loss_scale is not None

    @property
    def waits_for_norm(self) -> bool:
        """Whether updates wait for the norm, which also says whether gradients are finite."""
        return self.max_norm is not None or self.on_nan is not None or self.scales_loss
