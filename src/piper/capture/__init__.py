"""From a PyTorch model to regions with explicit forward and backward graphs."""

from piper.capture import torch_version as torch_version  # refuses untested versions
from piper.garbage import importing

with importing():  # torch has 1,000 modules for this
    from piper.capture.captured import Captured, capture, of_known_sizes, of_sizes
    from piper.capture.kernels.dropout import dropout_mask
    from piper.capture.marks.annotate import annotate
    from piper.capture.marks.tags import tag
    from piper.capture.outside.environment import Outside
    from piper.capture.precision import LossScale, Precision
    from piper.capture.python_state.description import described
    from piper.capture.python_state.watch import Watch
    from piper.capture.regions.layers import Layers, tag_layers, tag_unannotated
    from piper.capture.trace.replaced.arguments_private import keep_weights
    from piper.capture.visits.journey import (
        Stop,
        Visit,
        refuse_remembered,
        refuse_remembered_states,
    )

    keep_weights()

__all__ = [
    "Captured",
    "Layers",
    "LossScale",
    "Outside",
    "Precision",
    "Stop",
    "Visit",
    "Watch",
    "annotate",
    "capture",
    "described",
    "dropout_mask",
    "of_known_sizes",
    "of_sizes",
    "refuse_remembered",
    "refuse_remembered_states",
    "tag",
    "tag_layers",
    "tag_unannotated",
]
