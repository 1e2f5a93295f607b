"""What overlap gains with tensor parallelism, on paper: the simulator, for links of several speeds.

    python bench/tensor_parallel_simulated.py

The model is that of bench/tensor_parallel.py behind slowed links, divided over two devices. Piper's
compiler schedules each strategy for each link. Compute takes as long as on one CPU core. "In turn"
runs one pass after the other: only weight gradients of the same pass hide messages.
"""

from __future__ import annotations

from functools import partial

import torch
from common import save
from gpu_models import SIZES
from tensor_parallel_models import Model

from piper import Strategy, strategies
from piper.costs import Costs
from piper.job.batch.batch import Batch
from piper.job.compile.pricing import price
from piper.job.job import Job
from piper.job.options import Options
from piper.models.llama import LlamaConfig
from piper.sim.report import report

RATES = (1000, 470, 235, 150, 80)  # Mbit/s
PARTS = 4
SIZE = SIZES["links"]


def job_of(stages: int) -> Job:
    config = LlamaConfig(vocab=SIZE.vocab, dim=SIZE.dim, layers=SIZE.layers, heads=SIZE.heads)
    model = Model(config, SIZE.length, stages)
    one = strategies.one_f_one_b(pp=1, microbatches=PARTS)
    return Job(model, model.loss, one, Options(optimizer=partial(torch.optim.SGD, lr=0.1)))


def contenders() -> dict[str, tuple[Job, Strategy]]:
    whole, halves = job_of(1), job_of(2)
    how = {"pp": 1, "microbatches": PARTS, "tp": 2}
    return {
        "in turn": (whole, strategies.one_f_one_b(**how, ahead=False)),
        "1f1b": (whole, strategies.one_f_one_b(**how)),
        "gpipe": (whole, strategies.gpipe(**how)),
        "zb-h1": (whole, strategies.zb_h1(**how)),
        "dualpipev": (halves, strategies.dualpipev(**how)),
    }


def main() -> None:
    found: dict[str, dict[int, dict[str, float]]] = {}
    batch = Batch.of(SIZE.batch(parts=PARTS))
    for name, (job, strategy) in contenders().items():
        for rate in RATES:
            costs = Costs(link=rate * 125e3)
            _, compiled = job.under(strategy).compile(batch, costs)
            step = report(price(compiled, costs))
            one = step.devices[0]
            messages = sum(step.messages.values()) / len(step.devices)
            numbers = {"step": step.seconds, "compute": one.compute, "messages": messages}
            found.setdefault(name, {})[rate] = numbers
            shown = ", ".join(f"{key} {number:.3f} s" for key, number in numbers.items())
            print(f"{name:<10} {rate:5d} Mbit/s: {shown}", flush=True)
    save("tensor_parallel_simulated", found)


if __name__ == "__main__":
    main()
