"""The layers of a model without annotations, found where a strategy works layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from piper.capture import Captured, tag_unannotated
from piper.capture.marks.tags import untag
from piper.capture.python_state.reach import reach_of
from piper.capture.regions.layers import LAYER
from piper.directives import Strategy
from piper.errors import CaptureError
from piper.job.compile.chosen_directives import is_cut
from piper.job.compile.whole_model import by_layer

LOG = logging.getLogger("piper")
Inputs = tuple[Any, ...]


@dataclass
class LayerSearch:
    """Searches a model at most once for strategies that need no layers, but work better with them.

    If the model cannot be captured layer by layer, these strategies do without.
    """

    done: bool = False
    named: bool | None = None  # whether the code of the model names `annotate`
    optional: bool = False  # whether layers were tagged that no strategy so far needs

    def finds(
        self, model: nn.Module, strategy: Strategy, inputs: Inputs, before: dict[Any, Captured]
    ) -> bool:
        """Whether it found layers now, and tagged them. Captures `before` may have tags already.

        If not, they were made without those, and are forgotten.
        """
        needed = is_cut(strategy)
        if not needed and (self.done or by_layer(strategy) is None):
            return False
        if any(region.tags for one in before.values() for region in one.model.regions):
            return False
        self.done, found = True, tag_unannotated(model, inputs)
        self.optional = bool(found) and not needed
        if found is not None:
            before.clear()
        return found is not None

    def around(
        self, model: nn.Module, find: Callable[[], bool], capture: Callable[[], Captured]
    ) -> Captured:
        """Search before the capture, or behind it, where the capture may show that none is needed.

        A search runs the model once, which takes a tenth of a start.
        """
        if self.named is None:
            self.named = names_annotate(model)
        if self.done or not self.named:
            find()
            return capture()
        try:
            found = capture()
        except CaptureError:
            if not find():
                raise
            return capture()
        return capture() if find() else found

    def captured(self, model: nn.Module, capture: Callable[[], Captured]) -> Captured:
        try:
            return capture()
        except CaptureError as error:
            if not self.optional:
                raise
            LOG.info("the model is captured as one region, as its layers could not be: %s", error)
            untag(model, LAYER)
            self.optional = False
            return capture()


def names_annotate(model: nn.Module) -> bool:
    """Whether some code of the model does, which may or may not run."""
    return "annotate" in reach_of(("model", model)).names
