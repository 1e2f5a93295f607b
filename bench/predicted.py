"""Step times that the simulator predicts, against step times measured on this machine.

    python bench/predicted.py [--repeats 7] [--ranks 2 4] [--real]

Costs are profiled in one process first (links and cores by a probe). Then every strategy runs on 2
and 4 local processes. Devices are emulated (bench/emulated.py), so that four ranks do not compete
for two cores: operators sleep as long as they would take. Communication is real. With --real, ranks
compute on the shared cores. Goal: within 10 % for all, 5 % for most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import emulated
import models
import torch
import torch.distributed as dist
from common import interleaved, save
from models import cross_entropy

import piper
from piper.costs import Costs
from piper.job.batch.batch import Batch
from piper.job.compile.pricing import price
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.profiling import profile
from piper.launcher.local import run_local
from piper.models.llama import LlamaConfig
from piper.sim.report import report
from piper.trainer import Trainer

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
LLAMA = LlamaConfig(vocab=1024, dim=256, layers=8, heads=4)
EMULATED = emulated.Config(dense=8e-3, expert=8e-3)
emulated.LONG = 0.0  # host work between products takes real time
BALLAST = 2**20  # parameters of a stage that are only sent
PARTS, LENGTH = 8, 128
Case = tuple[str, int, int, dict[str, Any]]  # schedule, pp, stages, options
CASES: dict[int, list[Case]] = {
    2: [
        ("gpipe", 2, 2, {}),
        ("1f1b", 2, 2, {}),
        ("zb-h1", 2, 2, {}),
        ("interleaved-1f1b", 2, 4, {}),
        ("zbv", 2, 4, {}),
        ("dualpipev", 2, 4, {}),
        ("1f1b", 1, 1, {"dp": 2, "zero": 0}),
        ("1f1b", 1, 1, {"dp": 2, "zero": 2}),
        ("1f1b", 1, 4, {"dp": 2, "zero": 3}),
    ],
    4: [
        ("gpipe", 4, 4, {}),
        ("1f1b", 4, 4, {}),
        ("zbv", 4, 8, {}),
        ("dualpipev", 4, 8, {}),
        ("1f1b", 2, 2, {"dp": 2, "zero": 0}),
        ("1f1b", 2, 2, {"dp": 2, "zero": 2}),
        ("zbv", 2, 4, {"dp": 2, "zero": 1}),
        ("1f1b", 2, 2, {"dp": 2, "ep": 2}),
        ("dualpipev", 2, 4, {"dp": 2, "ep": 2}),
    ],
}


class Heavy(torch.nn.Module):
    """An emulated model with parameters that take time to send."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        whole = emulated.Staged(EMULATED, stages)
        self.stages = whole.stages
        self.ballast = torch.nn.ParameterList(torch.zeros(BALLAST) for _ in range(stages))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens
        for k, stage in enumerate(self.stages):
            with piper.annotate("PP", k):
                x = stage(x)
                x = x + self.ballast[k][: x.shape[-1]]
        return x


def built(stages: int, real: bool) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    if real:
        return models.Staged(LLAMA, stages), models.batch(LLAMA, PARTS, LENGTH)
    return Heavy(stages), emulated.batch(EMULATED.vocab, PARTS, EMULATED.time)


def cases(ranks: int, real: bool) -> list[Case]:
    return [case for case in CASES[ranks] if not (real and "ep" in case[3])]


def name_of(case: Case, ranks: int) -> str:
    schedule, pp, _, options = case
    more = "".join(f" {key}={value}" for key, value in options.items())
    return f"{ranks} ranks: {schedule} pp={pp}{more}"


def strategy_of(case: Case) -> piper.Strategy:
    schedule, pp, stages, options = case
    if stages > pp and schedule == "1f1b":  # several stages on one device
        places = [piper.Place(piper.where(PP=k), range(2)) for k in range(stages)]
        keep = [piper.Replicate(piper.where(PP=k), range(2), zero=3) for k in range(stages)]
        return piper.Strategy([*places, *keep, piper.Split("MB", PARTS)])
    return piper.strategies.BUILDERS[schedule](pp=pp, microbatches=PARTS, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--real", action="store_true", help="compute on the shared cores")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--costs", default="", help="of an earlier run; measured otherwise")
    parser.add_argument("--into", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        measure(chosen)
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(chosen.costs or Path(folder) / "costs.json")
        if not chosen.costs:
            costs.write_text(profiled(chosen.ranks, chosen.real).to_json())
        known = costs.read_text()
        print(known)
        for ranks in chosen.ranks:
            into = Path(folder) / f"{ranks}.json"
            given = ["--costs", str(costs), "--into", str(into), "--repeats", str(chosen.repeats)]
            given += ["--real"] if chosen.real else []
            if run_local(sys.argv[0], given, ranks, {"OMP_NUM_THREADS": "1"}):
                raise SystemExit(1)
            results |= json.loads(into.read_text())
    summary(results)
    save(
        "predicted_real" if chosen.real else "predicted",
        {"rows": results, "costs": json.loads(known)},
    )


def profiled(ranks: list[int], real: bool) -> Costs:
    """Profile every cut of the model in this process. Each emulated device has its own core."""
    found: Costs | None = None
    for stages in dict.fromkeys(case[2] for n in ranks for case in cases(n, real)):
        places = [piper.Place(piper.where(PP=k), [0]) for k in range(stages)]
        model, data = built(stages, real)
        strategy = piper.Strategy([*places, piper.Split("MB", PARTS)])
        options = Options(optimizer=ADAMW)
        new = profile(Job(model, cross_entropy, strategy, options), Batch.of(data))
        found = found.with_figures(new.figures) if found else new
    assert found is not None
    return found if real else replace(found, cores=0.0, wire=0.0)


def measure(chosen: argparse.Namespace) -> None:
    """In each of several processes: run all strategies, and compare with the predictions."""
    dist.init_process_group("gloo")
    ranks, costs = dist.get_world_size(), Costs.from_json(Path(chosen.costs).read_text())
    rows: dict[str, Any] = {}
    for case in cases(ranks, chosen.real):
        model, data = built(case[2], chosen.real)
        strategy = strategy_of(case)
        trainer = Trainer(model, cross_entropy, strategy, optimizer=ADAMW, example=data)
        step = {"piper": partial(trainer.step, *data)}
        times = interleaved(step, chosen.repeats, warmup=2, fence=dist.barrier)["piper"]
        made = list(trainer._programs.made.values())  # only device 0 compiled
        trainer.close()
        if dist.get_rank() == 0:
            found = report(price(made[0], costs))
            rows[name_of(case, ranks)] = row(times, found.seconds)
            show(name_of(case, ranks), rows[name_of(case, ranks)])
    if dist.get_rank() == 0:
        Path(chosen.into).write_text(json.dumps(rows))


def row(times: list[float], predicted: float) -> dict[str, Any]:
    middle = statistics.median(times)
    error = predicted / middle - 1
    return {"measured": middle, "predicted": predicted, "error": error, "times": times}


def show(name: str, found: dict[str, Any]) -> None:
    measured, predicted = 1e3 * found["measured"], 1e3 * found["predicted"]
    low, high = 1e3 * min(found["times"]), 1e3 * max(found["times"])
    print(
        f"{name:34} measured {measured:7.1f} ms [{low:.1f}, {high:.1f}]  "
        f"predicted {predicted:7.1f} ms  error {100 * found['error']:+5.1f} %",
        flush=True,
    )


def summary(rows: dict[str, Any]) -> None:
    errors = sorted(abs(found["error"]) for found in rows.values())
    print(
        f"{len(errors)} strategies: mean error {100 * statistics.mean(errors):.1f} %, median "
        f"{100 * statistics.median(errors):.1f} %, largest {100 * errors[-1]:.1f} %; within 10 %: "
        f"{sum(e <= 0.1 for e in errors)}, within 5 %: {sum(e <= 0.05 for e in errors)}"
    )


if __name__ == "__main__":
    main()
