"""What training updates, and where devices that divide regions hold it: others read it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from piper.ir.model import Model
from piper.ir.placement.division import DivisionRequest
from piper.ir.placement.placements import Placement


@dataclass
class TrainedParameters:
    """Of all captures so far. The first one of a strategy says where parameters are."""

    names: set[str] = field(default_factory=set)
    placements: dict[str, Placement] = field(default_factory=dict)

    def see(self, model: Model) -> None:
        for bucket in model.buckets.values():
            if bucket.trainable:
                self.names.update(parameter.name for parameter in bucket.parameters)
            for one in bucket.parameters:
                self.placements.setdefault(one.name, one.placement)

    def held(self, requests: Sequence[DivisionRequest]) -> list[DivisionRequest]:
        """The same divisions, with weights where they are. A search for batches of another shape,
        or without gradients, may find other places."""
        known = dict(self.placements)
        return [replace(one, held=known) if one.what == "weights" else one for one in requests]

    def anywhere(self) -> TrainedParameters:
        """For another strategy."""
        return TrainedParameters(set(self.names))
