"""From a PyTorch model to regions with explicit forward and backward graphs."""

from piper.capture.annotate import annotate
from piper.capture.captured import Captured, capture
from piper.capture.dropout import dropout_mask
from piper.capture.tags import tag

__all__ = ["Captured", "annotate", "capture", "dropout_mask", "tag"]
