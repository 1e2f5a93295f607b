"""Whether a model does with the rows of the whole batch what it does with those of a microbatch.

Python code may branch on their number, between two microbatches, which a trial compares, and all.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from piper.capture import Captured, Precision
from piper.capture.loss import LossForm
from piper.capture.torch_private import VALUE_WANTED, fake_errors_unlogged
from piper.capture.trace.row_calls.recorded_calls import (
    RecordedCall,
    RowCounts,
    without_expansions,
)
from piper.capture.trace.row_calls.row_numbers import counting_line
from piper.capture.trace.row_calls.row_places import RowPlaces
from piper.capture.trace.row_calls.unvalued_run import calls_of
from piper.capture.trace.trials.trial_run import TrialRuns
from piper.errors import CaptureError, first_line
from piper.job.batch.batch import Batch, Sizes
from piper.job.loss.loss_reduction import own_rows
from piper.job.loss.trial_messages import numbered_rows

LOG = logging.getLogger("piper")


@dataclass(frozen=True)
class WholeBatch:
    """The rows of each microbatch of all replicas, and the model that should not care."""

    sizes: Sizes
    runs: TrialRuns
    precision: Precision | None
    parts: Sequence[Batch] = ()  # microbatches of this process
    replicas: int = 1
    form: Callable[[Batch], LossForm] | None = None  # of a model's own loss, from two graphs

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    @property
    def times(self) -> int | None:
        """So many equal microbatches. None: they have different sizes."""
        return len(self.sizes) if len(set(self.sizes)) == 1 else None

    def others(self, one: Batch) -> list[Batch]:
        """A microbatch of each other size than this one's."""
        by_rows = {part.rows: part for part in reversed(self.parts)}
        return [part for rows, part in by_rows.items() if rows != one.rows]

    def warnings(
        self, captured: Captured, tried: bool = False, seen: frozenset[int] = frozenset()
    ) -> Iterator[str]:
        """For each size of microbatches that calls something else than the whole batch does.

        `tried`: numbers have shown that other calls compute the same, as a loop over rows does.
        `seen`: sizes of which as many equal microbatches have shown that no row's place matters.
        """
        for own in dict.fromkeys(self.sizes):
            if own < self.rows:
                yield from self._compared(captured, RowCounts(own, self.rows), tried, own in seen)

    def _compared(
        self, captured: Captured, rows: RowCounts, tried: bool, seen: bool
    ) -> Iterator[str]:
        try:
            own = self._calls(captured, rows.own)
        except Exception as error:  # it needs values, of any number of rows
            LOG.info("calls of a microbatch and of a batch are not compared: %s", first_line(error))
            return
        try:
            found = self._calls(captured, rows.all)
            differs = rows.first_difference(own, found)
            if differs is not None:
                own, found = without_expansions(own), without_expansions(found)
                differs = rows.first_difference(own, found)
        except (CaptureError, *VALUE_WANTED) as error:
            yield other_code(rows, first_line(error))
        except Exception as error:  # plain training on the whole batch fails, too
            what = f"{type(error).__name__} {first_line(error)}"
            LOG.info("the model does not run with the %d rows of the batch: %s", rows.all, what)
        else:
            if differs is not None:
                yield from () if tried else [other_code(rows, differs.line)]
            elif seen:
                return
            elif (meeting := searched(RowPlaces().first, own, found, rows)) is not None:
                say = numbered_rows if meeting.numbered else own_rows
                yield say(meeting.line)
            elif (line := searched(counting_line, own, found, rows)) is not None:
                yield from () if self._is_proved(captured, rows.own) else [own_rows(line)]

    def _is_proved(self, captured: Captured, rows: int) -> bool:
        """Whether numbers that follow those of rows leave a model's own loss what one graph shows.

        No kind: a warning says that nobody knows what it is.
        """
        known = captured.form
        if self.form is None or known.kind is None or not self.parts:
            return True
        alike = [one for one in self.parts if one.rows == rows] or self.parts
        found = self.form(alike[0])
        return (found.kind, found.counts) == (known.kind, known.counts)

    def _calls(self, captured: Captured, rows: int) -> list[RecordedCall]:
        given = captured.inputs.with_rows(rows), captured.device, self.precision
        with fake_errors_unlogged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trace gave them
            return calls_of(self.runs.model, self.runs.loss_fn, *given)


T = TypeVar("T")
Calls = Sequence[RecordedCall]


def searched(
    search: Callable[[Calls, Calls, RowCounts], T | None], own: Calls, every: Calls, rows: RowCounts
) -> T | None:
    """The search only warns: calls of a kind that it has never seen must not stop a run."""
    try:
        return search(own, every, rows)
    except (LookupError, TypeError, ValueError) as error:
        LOG.info("rows that meet are not searched for: %s", first_line(error))
        return None


def other_code(rows: RowCounts, where: str) -> str:
    at = f" ({where})" if where else ""
    return (
        f"with the {rows.all} rows of the whole batch, the model or its loss calls something else "
        f"than with the {rows.own} of a microbatch{at}: each microbatch uses its own rows, as in a "
        "loop that accumulates gradients, so the loss may differ from that of one batch; do not "
        "branch on the number of rows, or use one microbatch and one replica to make them equal"
    )
