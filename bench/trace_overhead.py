"""What recording costs: the same program takes plain and recorded steps in turn.

    piper run bench/trace_overhead.py -n 2

Goal: under 2 % of a step.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial

import torch
import torch.distributed as dist
from common import interleaved, ratio, save
from host_time import loop_alone
from models import Staged, batch, cross_entropy

import piper
from piper.models.llama import LlamaConfig
from piper.runtime.batch import StepInputs
from piper.runtime.execute import Program
from piper.runtime.observe.clocks import offset_to_first
from piper.runtime.observe.recorder import Recorder, merged
from piper.runtime.processes.world import gather

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
CASES = {  # dim, layers, length, microbatches, strategy
    "llama pipeline": (256, 4, 128, 8, {}),
    "tiny pipeline, host-bound": (16, 2, 8, 16, {}),
    "tiny replicas with ZeRO-3, host-bound": (16, 2, 8, 8, {"pp": 1, "dp": 2, "zero": 3}),
}


def trainer_of(dim: int, layers: int, length: int, parts: int, options: dict[str, int]):
    strategy = piper.strategies.one_f_one_b(**{"pp": 2, **options}, microbatches=parts)
    config = LlamaConfig(vocab=1024 if dim > 16 else 32, dim=dim, layers=layers, heads=4)
    data = batch(config, parts, length)
    model = Staged(config, options.get("pp", 2))
    made = partial(piper.Trainer, model, cross_entropy, strategy, graphs=False)
    return made(optimizer=ADAMW, example=data), data


def overhead(recorder: Recorder, work, repeats: int, fence) -> dict[str, object]:
    """Take steps in turn: the extra cost of a recorded one, in all and per instruction.

    On a busy host, processor time says more than wall time.
    """
    plain, cpu = recorder.program.step, {"recorded": [], "plain": []}

    def timed(name: str, step) -> None:
        started = time.process_time()
        step(work)
        cpu[name].append(time.process_time() - started)

    steps = {
        name: partial(timed, name, s) for name, s in zip(cpu, (recorder.step, plain), strict=True)
    }
    times = interleaved(steps, repeats, fence=fence)
    cpu = {name: seconds[-repeats:] for name, seconds in cpu.items()}
    more = quarter(cpu["recorded"]) - quarter(cpu["plain"])
    return {
        **ratio(times, "recorded", "plain"),
        "quick": quarter(times["recorded"]) / quarter(times["plain"]),
        "cpu": quarter(cpu["recorded"]) / quarter(cpu["plain"]),
        "instructions": len(recorder.acts),
        "cpu_us_per_instruction": 1e6 * more / len(recorder.acts),
        "times": times,
        "cpu_times": cpu,
    }


def quarter(seconds: list[float]) -> float:
    """The lower quartile of the steps: steadier than the median on a busy host."""
    return sorted(seconds)[len(seconds) // 4]


def between(program: Program, work, plans) -> dict[str, float]:
    """Seconds outside of steps: once per recording, and after each of its steps."""
    started = time.perf_counter()
    offset = offset_to_first()
    aligned = time.perf_counter()
    recorder = Recorder(program)
    recorder.step(work)
    doubt = torch.tensor(offset.doubt)
    dist.all_reduce(doubt, op=dist.ReduceOp.MAX)
    stepped = time.perf_counter()
    everyone = gather((recorder.notes(), offset.nanoseconds))
    if everyone is not None:
        merged(1, plans, everyone)
    return {
        "clocks_ms": 1e3 * (aligned - started),
        "doubt_us": doubt.item() / 1e3,
        "gather_ms": 1e3 * (time.perf_counter() - stepped),
    }


def measured(name: str, repeats: int) -> dict[str, object]:
    trainer, data = trainer_of(*CASES[name])
    given, kind = trainer._batch_of(data)
    program, work = trainer._ready(given, kind, trainer._job.weights(given))
    found = overhead(Recorder(program), work, repeats, dist.barrier)
    plans = trainer._programs.made[kind].plans if trainer.rank == 0 else ()
    found |= between(program, work, plans)
    trainer.close()
    return found


def empty() -> tuple[Recorder, StepInputs]:
    """The loop alone, without the tensor work that remains when kernels do nothing."""
    program, work = loop_alone()
    recorder = Recorder(program)
    kept = [
        k for k, one in enumerate(program.plan.instructions)
        if type(one).__name__ not in ("Add", "Total", "Update")
    ]  # fmt: skip
    program.acts = [program.acts[k] for k in kept]
    recorder.acts = [recorder.acts[k] for k in kept]
    return recorder, work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=41)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    if os.environ["RANK"] == "0":  # while the other rank waits
        results["empty kernels"] = overhead(*empty(), chosen.repeats, lambda: None)
        tell("empty kernels", results["empty kernels"])
    dist.init_process_group("gloo")
    for name in CASES:
        results[name] = measured(name, chosen.repeats)
        tell(name, results[name])
    if dist.get_rank() == 0:
        save("trace_overhead", {"load": os.getloadavg()[0], **results})
    dist.barrier()


def tell(name: str, found) -> None:
    if os.environ["RANK"] == "0":
        print(
            f"{name:38} {found['median']:.3f}x [{found['low']:.3f}, {found['high']:.3f}], "
            f"quick {found['quick']:.3f}x, plain {found['theirs_ms']:.1f} ms; "
            f"processor {found['cpu']:.3f}x, "
            f"{found['cpu_us_per_instruction']:.2f} us for each of {found['instructions']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
