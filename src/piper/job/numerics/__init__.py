"""Compare a strategy with plain PyTorch: the same model, data and optimizer, trained both ways.

The strategy runs with every device as a thread of this process. A copy of the model is trained by
autograd, without Piper. They share nothing but the data.
"""

from piper.job.numerics.compare import Comparison, Parameter, Step, compare

__all__ = ["Comparison", "Parameter", "Step", "compare"]
