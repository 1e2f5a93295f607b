"""Buffers that a forward only updates: microbatches and replicas may leave others than a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from piper.capture import Captured
from piper.capture.trace.trials.trial_run import TrialRuns, in_type
from piper.job.batch.batch import Batch
from piper.job.batch.trial_batches import Variety, pairs_like
from piper.job.loss.trial_size import trial_size

STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCES = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
CLOSE = 1e-6
Left = dict[str, Tensor]  # parameters and buffers, by name


@dataclass(frozen=True)
class KeptBuffers:
    """What is left in buffers that neither the loss nor a gradient depends on.

    Batch norms are left out: everybody knows what theirs are, and docs say so.
    """

    runs: TrialRuns
    replicas: int
    microbatches: int  # of all replicas

    def names(self, captured: Captured) -> list[str]:
        known = {
            f"{path}.{name}" if path else name
            for path, module in self.runs.model.named_modules(remove_duplicate=False)
            if isinstance(module, STATISTICS + INSTANCES)
            for name, _ in module.named_buffers(recurse=False)
        }
        return [name for name in captured.kept_state if name not in known]

    def warnings(self, captured: Captured, one: Batch) -> Iterator[str]:
        """`one`: a microbatch, for random ones like it."""
        size, names = trial_size(captured, one), self.names(captured)
        is_known = size is not None and size.is_whole
        found = self.changed(names, one) if is_known and names else names
        if found:
            yield others_are_left(found, self.replicas, is_known)

    def changed(self, names: Sequence[str], one: Batch) -> list[str]:
        """Those that microbatches leave with other values than their batch does."""
        like = one, one.rows or 1, Variety.VARIED, 7, self.runs.comparisons
        tries = ((dtype, pair) for dtype in (torch.float64, None) for pair in pairs_like(*like))
        for dtype, pair in tries:
            try:
                whole, *others = self.left(pair.map(partial(in_type, dtype=dtype)), dtype)
            except Exception:  # whatever it is, other data or types may do
                continue
            known = (n for n in names if n in whole)  # those of a loss are not
            same = {n for n in known if all(is_same(whole[n], left[n]) for left in others)}
            return [n for n in names if n not in same]
        return list(names)

    def left(self, pair: Batch, dtype: torch.dtype | None) -> Iterator[Left]:
        """By the batch of two microbatches; by both, one after the other; and by the first alone,
        which is what a first replica has."""
        first, second = (part.arguments for part in pair.parts(2))
        yield self.runs.run(pair.arguments, dtype, calls=False).left
        alone = self.runs.run(first, dtype, calls=False).left
        if self.replicas > 1:
            yield alone
        if self.microbatches > self.replicas:
            after = replace(self.runs, initial=starting_from(alone, self.runs))
            yield after.run(second, dtype, calls=False).left


def starting_from(left: Left, runs: TrialRuns) -> Callable[[str], Tensor]:
    """The values of buffers from which the next microbatch starts."""
    return lambda name: left[name] if name in runs.buffers else runs.initial(name)


def is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    a, b = one.double().nan_to_num(), other.double().nan_to_num()
    size = float(torch.maximum(a.abs(), b.abs()).max())
    return bool(torch.allclose(a, b, rtol=0.0, atol=CLOSE * size))


def others_are_left(names: Sequence[str], replicas: int, known: bool) -> str:
    them = "it" if len(names) == 1 else "them"
    who = "replica" if replicas > 1 else "microbatch"
    first = ", and what the first one has is saved" if replicas > 1 else ""
    unless = "" if known else ", unless a sum over rows or the largest row is kept"
    return (
        f"the forward updates {', '.join(names)} and does not compute with {them}: each {who} "
        f"does so with its own rows{first}, so {them if them == 'it' else 'they'} will have other "
        f"values than after the whole batch{unless}. Losses and parameters are not affected; use "
        "one microbatch and one replica to make them equal"
    )
