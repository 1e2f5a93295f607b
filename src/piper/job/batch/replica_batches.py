"""The rows of each replica's batch and of its microbatches, where these differ."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

import torch

from piper.directives import Directive, Split
from piper.errors import InputError, Refused
from piper.ir.placement.replicas import Replicas
from piper.job.batch.batch import Batch, Shapes, Sizes
from piper.job.processes.consistency import OF_FIRST
from piper.names import amount


@dataclass(frozen=True)
class ReplicaBatches:
    """How a strategy cuts batches. A feed is what one process is given: the batch of a replica, or
    of several that share devices."""

    split: Split
    feeds: Replicas

    def __post_init__(self) -> None:
        found, wanted = len(self.unequal), len(self.feeds.feeds)
        if found not in (0, wanted):
            what = f"it has {amount(found, 'number')} for {amount(wanted, 'replica')}"
            fix = f"write {amount(wanted, 'number')}; replicas that share devices count as one"
            raise InputError.of("replica_sizes", what, fix)

    @property
    def unequal(self) -> Sizes:
        """What the strategy says of replicas, if they differ."""
        return self.split.unequal

    def microbatches(self, batch: Batch) -> Sizes:
        """The rows of each microbatch of a replica, if any of all replicas differ."""
        with suppress(Refused):
            rows = (batch.rows or 0) // self.feeds.parts
            return self.split.all_rows(rows) if self.unequal else self.split.rows(rows)
        return ()  # it is refused when it is compiled

    def refuse_uncut(self, batch: Batch) -> None:
        """Batches must have rows for every microbatch. `batch` is that of the first feed."""
        for feed, rows in enumerate(self.rows_of_all(batch.rows or 0)):
            try:
                self.split.rows(rows // self.feeds.parts)
            except Refused as refused:
                if self.feeds.parts > 1:
                    raise self.uncut_parts(rows) from None
                where = f"batch of replica {feed}" if self.unequal else "batch"
                raise InputError(where, *refused.problems) from None

    def uncut_parts(self, rows: int) -> InputError:
        """As DualPipe does, whose two ends of a pipeline have a part of the batch each."""
        parts, least = self.feeds.parts, self.feeds.parts * self.split.n
        many = amount(self.split.n, "microbatch", "microbatches")
        what = f"its {amount(rows, 'row')} are divided into {parts} parts of {many} each"
        return InputError.of("batch", what, f"use a batch of at least {amount(least, 'row')}")

    def rows_of_all(self, rows: int, feed: int = 0) -> Sizes:
        """The rows of every feed, from those of one."""
        if not self.unequal:
            return (rows,) * len(self.feeds.feeds)
        unit, more = divmod(rows, self.unequal[feed] * self.feeds.parts)
        if more or not unit:
            whole = self.unequal[feed] * self.feeds.parts
            what = f"it has {amount(rows, 'row')}, and replica {feed} is to have {whole}"
            said = f"replica_sizes={list(self.unequal)}"
            fix = f"give it {whole} rows, or a multiple of it; or change {said} of the strategy"
            raise InputError.of("batch", f"{what} or a multiple of it: {said}", fix)
        return tuple(unit * size * self.feeds.parts for size in self.unequal)

    def everywhere(self, count: int, feed: int) -> int:
        """What all feeds have together, of what is in proportion to rows."""
        if not self.unequal:
            return count * len(self.feeds.feeds)
        return count * sum(self.unequal) // self.unequal[feed]

    def sizes(self, batch: Batch, feed: int) -> tuple[int, int | None]:
        """Samples and tokens of all feeds together, from the batch of one."""
        tokens = batch.tokens
        samples = self.everywhere(batch.rows or 1, feed)
        return samples, None if tokens is None else self.everywhere(tokens, feed)

    def shares(self, rows: int) -> Sizes:
        """The rows of each feed, from those of all together."""
        each, more = divmod(rows, sum(self.unequal) * self.feeds.parts)
        if more or not each:
            total = sum(self.unequal) * self.feeds.parts
            what = f"it has {amount(rows, 'row')}, which replica_sizes={list(self.unequal)}"
            fix = f"use {total} rows for all replicas together, or a multiple of it"
            raise InputError.of("batch", f"{what} does not divide", fix)
        return tuple(each * size * self.feeds.parts for size in self.unequal)

    def divided(self, whole: Batch) -> list[Batch]:
        """The batch of each feed, of that of all together."""
        sizes = self.shares(whole.rows or 0) if self.unequal else ()
        return whole.parts(len(self.feeds.feeds), sizes)

    def first_rows(self, rows: int, feed: int) -> int:
        """How many rows the feeds before this one have together."""
        return sum(self.rows_of_all(rows, feed)[:feed])

    def as_first(self, batch: Batch, feed: int) -> Batch:
        """A batch like that of the first feed: what programs are compiled for."""
        if not self.unequal or not feed:
            return batch
        return with_rows(batch, self.rows_of_all(batch.rows or 0, feed)[0])

    def first_shapes(self, batch: Batch, feed: int) -> Shapes:
        """The shapes of the first feed's batch. All processes have them in common."""
        if not self.unequal:
            return batch.shapes
        rows = self.rows_of_all(batch.rows or 0, feed)[0]  # also if it is its own
        shapes = with_rows(batch.map(to_meta), rows).shapes
        return (*shapes[:-1], f"{shapes[-1]}, {OF_FIRST}{list(self.unequal)}")

    def of_each_size(self, batch: Batch) -> dict[int, Batch]:
        """The first microbatch of each size, by its rows. `batch` is that of the first feed."""
        own, count = self.microbatches(batch), self.split.n * self.feeds.parts
        rows = own or ((batch.rows or 0) // count,)
        found = {size: batch.part(rows.index(size), count, own) for size in dict.fromkeys(rows)}
        for other in self.rows_of_all(batch.rows or 0) if self.unequal else ():
            for size in self.split.all_rows(other // self.feeds.parts):
                if size not in found:
                    found[size] = with_rows(batch, size)
        return found

    def of_all_microbatches(self, batch: Batch, feed: int = 0) -> Sizes:
        """The rows of each microbatch of all feeds, from the batch of one."""
        parts, feeds = self.feeds.parts, self.rows_of_all(batch.rows or 1, feed)
        own = (self.split.all_rows(max(1, rows // parts)) * parts for rows in feeds)
        return tuple(chain.from_iterable(own))

    def written(self, program: Sequence[Directive], batch: Batch) -> tuple[Directive, ...]:
        """The directives with the rows of this batch, that of the first feed."""

        def cut(one: Split) -> Split:
            if self.unequal:
                rows = (rows // self.feeds.parts for rows in self.rows_of_all(batch.rows or 0))
                return replace(one, replica_sizes=tuple(rows))
            return replace(one, sizes=self.microbatches(batch) or None, replica_sizes=None)

        return tuple(cut(one) if isinstance(one, Split) else one for one in program)


def with_rows(batch: Batch, rows: int) -> Batch:
    """A batch of the same form with so many rows, taken from it in turn."""
    return batch.change_rows(lambda tensor: tensor[turns(rows, tensor)])


def turns(rows: int, tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows, device=tensor.device) % max(tensor.shape[0], 1)


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")
