"""The user's optimizer gives every parameter what it would give in a plain loop, or is refused."""

from __future__ import annotations

import torch

from piper.ir.model import Model
from piper.job.options import Options
from piper.runtime.state.whole_options import refuse_options_by_position


def refuse_positions(options: Options, model: torch.nn.Module, captured: Model) -> None:
    """Options that depend on a parameter's position, or on how many there are."""
    trained = [bucket for bucket in captured.buckets.values() if bucket.trainable]
    buckets = [[parameter.name for parameter in bucket.parameters] for bucket in trained]
    known = {name for names in buckets for name in names}
    parameters = {name: one for name, one in model.named_parameters() if name in known}
    found = [names for names in buckets if not parameters.keys().isdisjoint(names)]
    refuse_options_by_position(options.optimizer, options.lr_scheduler, parameters, found)
