"""What an error of capture means for a known kind of model."""

from __future__ import annotations

import torch

from piper.errors import CaptureError, Problem


def about_experts(error: CaptureError, model: torch.nn.Module) -> CaptureError:
    """Experts as transformers runs them cannot be captured: say so, and what to write."""
    from piper.models.hugging_face import unadapted_experts  # registers operators, which takes time

    path = unadapted_experts(model)
    if path is None:
        return error
    what = f"the experts {path} are those of transformers, which cannot be captured"
    fix = "write piper.models.hugging_face.adapt_experts(model) before the Trainer"
    return CaptureError(error.where, Problem(what, fix), *error.problems)
