"""Whether what a model computes from all rows of a microbatch would matter, were it another value.

Random data may never show it: a guard such as `x.abs().amax().clamp(min=3)`, a loss with a floor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from piper.capture.trace.trials.reduced_rows import OtherValues, Place, Reductions, reductions
from piper.capture.trace.trials.trial_run import Trial, TrialRuns
from piper.job.batch.batch import Batch
from piper.job.loss.rows_compared import growing, is_among, plain

SHIFTS = (-1e6, -40.0, -1.0, 1.0, 40.0, 1e6)  # times the size of a value
OTHERS = ((1e6, 40.0), (-1e6, -40.0), (None,))  # zero; a smaller one where a result is not finite
FEW = 16  # values to look at one by one


@dataclass(frozen=True)
class OtherStatistics:
    """Runs of one microbatch with other values in place of those that all of its rows give."""

    runs: TrialRuns
    whole: Trial
    part: Trial
    batch: Batch  # of the part
    times: int  # the whole has so many times the rows
    dtype: torch.dtype | None
    tolerance: float

    @cached_property
    def places(self) -> Reductions:
        """The calls that reduce over rows."""
        return reductions(self.whole.sizes, self.part.sizes)

    def line_of_rows(self) -> str | None:
        """The line of the first value that rows of the output depend on."""
        last = max((self.part.made_by[k] for k in self.row_outputs), default=-1)
        places = [one for k, one in self.places.items() if k < last]
        for shifts in OTHERS if places else ():
            for shift in shifts:
                lines, changed = self._changed(places, shift)
                if changed:
                    each = (self._changed([one], shift) for one in places)
                    return next((own[0] for own, alone in each if alone), lines[0])
                if changed is False and not lines:
                    return None  # none of these values follows the batch
                if changed is False:
                    break
        return None

    def line_of_loss(self) -> str | None:
        """The line of the first value in the loss function that the loss is not linear in."""
        places = [one for k, one in self.places.items() if k >= self.part.before_loss][:FEW]
        found = (self._bends(k) for k in places)
        return next(filter(None, found), None)

    @cached_property
    def row_outputs(self) -> list[int]:
        if len(self.whole.output) != len(self.part.output):  # one for each row
            return []
        pairs = enumerate(zip(self.whole.output, self.part.output, strict=True))
        return [k for k, (a, b) in pairs if growing(a, b, self.times) is not None]

    def _changed(
        self, places: Collection[Place], shift: float | None
    ) -> tuple[list[str], bool | None]:
        """The lines whose values were replaced, and whether that changes rows of the output.

        None: that is not known, because it gives no finite numbers.
        """
        found = self._run(places, shift)
        if found is None:
            return [], None
        trial, lines = found
        pairs = [(self.part.output[k], trial.output[k]) for k in self.row_outputs]
        if not all(a.shape == b.shape and b.isfinite().all() for a, b in pairs):
            return lines, None
        return lines, bool(lines) and any(self._differ(a, b) for a, b in pairs)

    def _differ(self, one: Tensor, other: Tensor) -> bool:
        a, b = plain(one).reshape(1, -1), plain(other).reshape(1, -1)
        return not is_among(a, b, self.tolerance)

    def _bends(self, place: Place) -> str | None:
        base, found = float(self.part.loss), dict(self._losses(place))
        if len(found) < 2:
            return None
        lines = {line for _, line in found.values()}
        last = max(found, key=abs)
        slope = (found[last][0] - base) / last
        for shift, (loss, _) in found.items():
            size = max(abs(loss), abs(base), abs(shift * slope))
            if abs(base + shift * slope - loss) > self.tolerance * size:
                return next(iter(lines))
        return None

    def _losses(self, place: Place) -> Iterator[tuple[float, tuple[float, str]]]:
        for shift in SHIFTS:
            found = self._run([place], shift)
            if found is not None and found[1] and found[0].loss.isfinite():
                yield shift, (float(found[0].loss), found[1][0])

    def _run(
        self, places: Collection[Place], shift: float | None
    ) -> tuple[Trial, list[str]] | None:
        others = OtherValues(self.batch.tensors, frozenset(places), shift)
        try:
            derived = self.part.graph is not None  # torch may call others for a derivative
            found = self.runs.run(self.batch.arguments, self.dtype, False, derived, others=others)
        except Exception:  # it does not run with such values
            return None
        return found, others.lines
