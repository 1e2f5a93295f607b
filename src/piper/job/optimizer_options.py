"""The user's optimizer gives every parameter what it would give in a plain loop, or is refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from piper.errors import InputError, StrategyError
from piper.ir.model import Model
from piper.job.options import Options
from piper.runtime.optimizers.changed_weights import refuse_changed_weights
from piper.runtime.optimizers.joint_optimizers import refuse_common
from piper.runtime.optimizers.known_optimizers import MakeOptimizer
from piper.runtime.optimizers.lost_state import lost_state
from piper.runtime.optimizers.own_parameters import with_attributes
from piper.runtime.optimizers.scheduler_sources import refuse_other_sources
from piper.runtime.optimizers.small_parameters import Kind, can_step, fitting, made, one_of_each
from piper.runtime.optimizers.user_optimizer import refuse_unusual
from piper.runtime.optimizers.whole_options import (
    named_like,
    refuse_options_by_position,
)

LOG = logging.getLogger("piper")
LOST = (
    "the optimizer's step reads %s, which it changes and keeps outside of optimizer.state: as with "
    "its own state_dict, `resume` would begin it anew, and train otherwise, and `retarget` is an "
    "error. %s"
)
KEEP = "Keep it in self.state[p] of each parameter, as numbers and tensors"


def refuse_optimizer(options: Options, model: torch.nn.Module, captured: Model) -> None:
    """Options by position or identity, and updates that depend on other parameters."""
    trained = [bucket for bucket in captured.buckets.values() if bucket.trainable]
    buckets = [[parameter.name for parameter in bucket.parameters] for bucket in trained]
    known = {name for names in buckets for name in names}
    parameters = {name: one for name, one in model.named_parameters() if name in known}
    found = [names for names in buckets if not parameters.keys().isdisjoint(names)]
    given = options.optimizer, options.lr_scheduler
    refuse_changed_weights(*given, parameters)
    refuse_closures(with_attributes(options.optimizer, parameters), one_of_each(parameters))
    refuse_other_sources(*given, parameters, len(found) > 1)
    refuse_options_by_position(*given, parameters, found)
    make = with_attributes(options.optimizer, parameters)
    refuse_common(make, [named_like(parameters, names) for names in found])
    if lost := lost_by(options, parameters):
        LOG.warning(LOST, lost, KEEP)


def refuse_closures(make: MakeOptimizer, kinds: Sequence[Kind]) -> None:
    """Steps that compute the loss again, as those of SAM."""
    found = fitting(make, kinds)
    if not can_step(make, found) and can_step(make, found, lambda: 1.0):
        refuse_unusual(made(make, found)[0])
        raise StrategyError.of(
            "optimizer",
            "its step needs a closure that computes the loss again, and a step of the Trainer "
            "computes it once",
            "use an optimizer that needs one gradient for each step, such as AdamW",
        )


def refuse_lost(options: Options, model: torch.nn.Module) -> None:
    """Another optimizer goes on with its state alone, in the middle of training."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if lost := lost_by(options, trained):
        raise InputError.of(
            "optimizer",
            f"its step reads {lost}, which it changes and keeps outside of optimizer.state: with "
            "another strategy it would begin anew, and train otherwise",
            KEEP[0].lower() + KEEP[1:],
        )


def lost_by(options: Options, parameters: dict[str, torch.nn.Parameter]) -> str | None:
    return lost_state(with_attributes(options.optimizer, parameters), one_of_each(parameters))
