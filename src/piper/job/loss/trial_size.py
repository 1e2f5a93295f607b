"""How much of a microbatch a trial on numbers runs, so that it takes about a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from piper.capture import Captured
from piper.capture.python_state.loss_state import Loss
from piper.capture.trace.trials.trial_run import TrialRuns
from piper.capture.trace.trials.windows import Window
from piper.ir.values import TensorSpec
from piper.job.batch.batch import Batch
from piper.job.memory.host_memory import free_memory
from piper.names import F

WHOLE = 2e8  # FLOPs of a microbatch that is tried as it is, three times
TINY = 5e6  # of one that is tried a dozen times
MOST = 1e10  # of a smaller one, for each thread: four of them take a core a few seconds
ROWS, TOKENS = 2, 8  # of a smaller one
SHARE = 10  # of the free memory of the host, and at most
LIMIT = 2**34
OWN_VALUES = 2**30  # bytes of parameters up to which a trial takes their first values


@dataclass(frozen=True, slots=True)
class TrialSize:
    """Rows of a microbatch in a trial. If they are shorter, how long they are, and were."""

    rows: int
    is_whole: bool = True  # all of the microbatch
    tokens: int | None = None
    length: int | None = None
    flops: float = 0.0  # of the microbatch, if it is whole

    def takes(self, times: int) -> bool:
        """Whether so many microbatches together are a small trial, too."""
        return bool(times * self.flops <= MOST * torch.get_num_threads())

    @property
    def is_tiny(self) -> bool:
        """Whether several trials more take no time to speak of."""
        return self.is_whole and self.flops <= TINY

    def __str__(self) -> str:
        return f"{self.rows} rows" + (f" of {self.tokens} tokens" if self.tokens else "")

    def cut(self, one: Batch) -> Batch:
        """The same batch with shorter rows: all sizes that are their length are cut."""
        if self.tokens is None:
            return one
        position = count()
        return one.map(lambda tensor: self._shorter(tensor, next(position) in one.whole))

    def _shorter(self, tensor: Tensor, whole: bool) -> Tensor:
        assert self.tokens is not None
        for dim in range(0 if whole else 1, tensor.dim()):
            if tensor.shape[dim] == self.length:
                tensor = tensor.narrow(dim, 0, self.tokens)
        return tensor


def trial_size(captured: Captured, one: Batch) -> TrialSize | None:
    """None if even a small trial takes too long, or too much memory."""
    rows, length = one.rows or 1, length_of(one)
    flops = sum(region.flops.get(F, 0.0) for region in captured.model.regions)
    if needed_bytes(captured) > min(LIMIT, free_memory() // SHARE):
        return None
    if flops <= WHOLE:
        return TrialSize(rows, flops=flops)
    fewer, limit = min(ROWS, rows), MOST * torch.get_num_threads()
    flops *= fewer / rows
    if flops <= limit:
        return TrialSize(fewer, is_whole=False)
    if length is None or length <= TOKENS or flops * TOKENS / length > limit:
        return None
    return TrialSize(fewer, False, TOKENS, length)


def trial_runs(
    model: nn.Module, loss_fn: Loss | None, initial: Callable[[str], Tensor], captured: Captured
) -> TrialRuns:
    return TrialRuns(model, loss_fn, initial, is_large(captured))


def is_large(captured: Captured) -> bool:
    """Whether a trial takes other values for matrices, which need less memory."""
    return sum(map(bytes_of, specs_of(captured))) > min(OWN_VALUES, free_memory() // SHARE)


def needed_bytes(captured: Captured) -> int:
    specs = specs_of(captured)
    if not is_large(captured):
        return sum(map(bytes_of, specs))
    largest = max(8 * spec.numel for spec in specs)  # a product copies a window
    return largest + sum(min(bytes_of(spec), bytes_of_window(spec)) for spec in specs)


def specs_of(captured: Captured) -> list[TensorSpec]:
    return [spec for bucket in captured.model.buckets.values() for spec in bucket.specs]


def bytes_of(spec: TensorSpec) -> int:
    """The first values of a parameter, and those in float64."""
    return spec.nbytes + 8 * spec.numel


def bytes_of_window(spec: TensorSpec) -> int:
    window = Window("", tuple(size or 0 for size in spec.shape), torch.float64)
    return 16 * window.numbers if window.saves else bytes_of(spec)


def length_of(one: Batch) -> int | None:
    """Tokens of a row, in a batch that begins with token ids."""
    return one.tokens // (one.rows or 1) if one.tokens else None
