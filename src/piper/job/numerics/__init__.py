"""Compare a strategy with plain PyTorch: the same model, data and optimizer, trained both ways.

The strategy runs as it would, with every device as a thread of this process. Beside it a copy of
the model, which Piper never sees, is trained by autograd. Nothing but the data is shared.
"""

from piper.job.numerics.compare import Comparison, Parameter, Step, compare

__all__ = ["Comparison", "Parameter", "Step", "compare"]
