"""What happens if the loss or the norm of a step is not finite: `Trainer(on_nan=...)`."""

from __future__ import annotations

import logging
from math import isfinite
from typing import Literal, get_args

from piper.errors import InputError, Problem
from piper.job.batch.batch import Batch
from piper.job.batch.whole_inputs import WholeInputs
from piper.runtime.batch import StepInputs
from piper.runtime.execute import Program
from piper.runtime.observe.not_finite import origin_of, update_anyway

LOG = logging.getLogger("piper")
OnNan = Literal["stop", "skip", "report"]
FIX = "look at that region and at the batch; lower the learning rate, or give max_norm"
IN_BATCH = "repair or leave out such rows in your loader"


def refuse_wrong_on_nan(on_nan: str | None, graphs: bool, scaled: bool) -> None:
    if on_nan is not None and on_nan not in get_args(OnNan):
        fix = 'write "stop", "skip" or "report", or leave it out'
        raise InputError.of("on_nan", f"there is no {on_nan!r}", fix)
    if on_nan is not None and graphs:
        what = "CUDA graphs cannot decide whether to update"
        raise InputError.of("on_nan", what, "leave out graphs=True, or on_nan")
    if on_nan is not None and scaled:
        what = "float16 finds its loss scale by steps that are not finite, and skips those"
        raise InputError.of("on_nan", what, 'leave out on_nan, or write precision="bf16"')


def after_step(
    on_nan: str | None,
    program: Program,
    inputs: StepInputs,
    step: int,
    known: WholeInputs,
    batch: Batch,
) -> bool:
    """Whether the step counts. Names the origin of a loss or norm that is not finite.

    Updates waited for the loss and the norm, and were not made if one is not finite. All processes
    see the same numbers.
    """
    if on_nan is None:
        return True
    loss, squares = program.totals.tolist()
    if isfinite(loss) and isfinite(squares):
        return True
    norm = "the norm of the gradients is not finite"
    what = norm if isfinite(loss) else f"the loss is {loss}"
    origin = origin_of(program, inputs, [name for name, *_ in known.names(batch)])
    text = f"step {step}: {what}; it began in {origin or 'a sum of several regions'}"
    if on_nan == "stop":
        fix = IN_BATCH if origin is not None and origin.in_batch else FIX
        raise InputError("on_nan", Problem(text, fix))
    if on_nan == "report":
        LOG.warning("%s", text)
        update_anyway(program, inputs)
        return True
    LOG.warning("%s; the step is skipped", text)
    return False
