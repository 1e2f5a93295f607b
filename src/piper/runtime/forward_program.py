"""Programs without a backward: for evaluation and prediction."""

from __future__ import annotations

from piper.runtime.execute import Program


class OutputProgram(Program):
    """Its "losses" are outputs of the model, one tensor for each microbatch."""

    def count_losses(self) -> None:
        """Outputs are kept, and not added up."""
