"""How long a step would take at the peak of all devices, for MFU."""

from __future__ import annotations

from collections import Counter

from piper.costs.devices import DEVICES, dtype_of
from piper.ir.model import Model
from piper.job.batch.batch import Batch
from piper.job.device_costs import kind_of
from piper.job.job import Job
from piper.names import B, F
from piper.runtime.processes.world import world


def best_seconds(job: Job, batch: Batch, feed: int) -> float | None:
    """None where the model or the peak is not known: on other processes, and on a CPU."""
    batch = job.rows.as_first(batch, feed)
    captured, kind = job.captured(batch), kind_of(job.device)
    flops = step_flops(job, batch)
    if captured is None or kind is None or flops is None:
        return None
    peak = DEVICES[kind].flops
    rate = peak.get(dtype_of(captured.model), peak["float32"])
    return flops / (rate * world())


def step_flops(job: Job, batch: Batch) -> float | None:
    """Of a step on all replicas, from the batch of the first feed."""
    one_of_each = job.rows.of_each_size(batch).items()
    captured = {rows: job.captures.get(job.kind(one)) for rows, one in one_of_each}
    each = {rows: model_flops(one.model) for rows, one in captured.items() if one is not None}
    if len(each) < len(captured):
        return None
    counts = Counter(job.rows.of_all_microbatches(batch))
    return sum(flops * counts[rows] for rows, flops in each.items())


def model_flops(model: Model) -> float:
    """Of the forward and backward of one microbatch, without what is recomputed."""
    return sum(region.flops.get(phase, 0.0) for region in model.regions for phase in (F, B))
