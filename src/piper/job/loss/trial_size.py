"""How much of a microbatch a trial on numbers runs, so that it takes about a second."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from piper.capture import Captured
from piper.job.batch.batch import Batch
from piper.job.memory.host_memory import free_memory
from piper.names import F

WHOLE = 2e8  # FLOPs of a microbatch that is tried as it is, three times
TINY = 5e6  # of one that is tried a dozen times
MOST = 4e9  # of a smaller one, for each thread: four of them take a core about a second
ROWS, TOKENS = 2, 8  # of a smaller one
SHARE = 10  # of the free memory of the host, and at most
LIMIT = 2**30


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


def needed_bytes(captured: Captured) -> int:
    """The first values of parameters, and those in float64."""
    specs = [spec for bucket in captured.model.buckets.values() for spec in bucket.specs]
    return sum(spec.nbytes + 8 * spec.numel for spec in specs)


def length_of(one: Batch) -> int | None:
    """Tokens of a row, in a batch that begins with token ids."""
    return one.tokens // (one.rows or 1) if one.tokens else None
