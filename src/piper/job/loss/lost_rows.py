"""Row numbers among the tensors of a batch, as those of nodes in a graph: they are cut with it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from piper.capture.loss import Count, counted
from piper.capture.source_lines import line_of
from piper.capture.trace.trials.trial_run import TrialRuns
from piper.errors import InputError, first_line
from piper.job.batch.batch import Batch
from piper.names import amount

BEYOND = re.compile(r"out of (bounds|range)")


def is_beyond(error: str) -> bool:
    """Whether an error of torch, as text, is about an index."""
    return BEYOND.search(error) is not None


def refuse_lost_rows(runs: TrialRuns, parts: Sequence[Batch], rows: int) -> None:
    """Refuse a batch whose microbatches look for rows that others have, as torch would in a step.

    The last one has numbers of its own rows, which are beyond their count. `rows`: of all
    microbatches. An index that is beyond a table, too, is none of a row.
    """
    for number in dict.fromkeys((0, len(parts) - 1)) if parts else ():
        part, own = parts[number], parts[number].rows or 1
        error = failure(runs, part)
        if error is not None and failure(runs, part.repeated(-(-rows // own))) is None:
            what = f"{line_of(error.__traceback__)} looks for others: {first_line(error)}"
            raise lost_rows(f"microbatch {number}", own, what) from None


def total_of(count: Count, microbatch: Batch) -> float:
    """What counts in a microbatch. Labels may be looked up by row numbers, as under mixup."""
    try:
        return counted(count, microbatch.tensors)
    except IndexError as error:
        what = f"counting {count.what} looks for others: {first_line(error)}"
        raise lost_rows("a microbatch", microbatch.rows or 1, what) from None


def failure(runs: TrialRuns, batch: Batch) -> Exception | None:
    """What torch says of an index, if anything."""
    try:
        runs.run(batch.arguments, None, False)
    except Exception as error:
        return error if is_beyond(str(error)) else None
    return None


def lost_rows(which: str, rows: int, what: str) -> InputError:
    return InputError.of(
        "batch",
        f"{which} has {amount(rows, 'row')}, and {what}. If tensors of the batch hold numbers of "
        "its rows, as those of nodes in a graph or of partners under mixup, these are cut with it, "
        "but count the rows of the whole",
        "use one microbatch and one replica; or make each graph one row, [graphs, nodes, width], "
        "with numbers that count the nodes of its own graph; under mixup, give the rows of the "
        "partners, x[partner] and y[partner], as tensors of the batch",
    )
