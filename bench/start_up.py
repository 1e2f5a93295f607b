"""From the launcher to the end of the first step, beside torch.distributed.pipelining.

    python bench/start_up.py --repeats 5                     (two processes on a CPU)
    python bench/start_up.py --share-gpu --processes 4 --dim 1024

- `piper, empty cache` and `piper, full cache`: `piper run`, PP over all processes, 1F1B. The second
  one reads the derivatives of regions from disk.
- `peer`: the same stages, microbatches and optimizer under torchrun. With `--share-gpu`,
  `piper run` starts it too, because torchrun does not share a GPU.

Seconds of the clock, and CPU seconds of all processes, which a busy machine disturbs less. The
bytecode of all modules is there before, as after an installation, even where the environment says
that Python writes none.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

SIZES = {"layers": 8, "dim": 64, "rows": 8, "length": 64, "vocab": 256}
PARTS = 4
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
PIPER_RUN = [sys.executable, "-m", "piper", "run", "--quiet", "-n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {**SIZES, "processes": 2, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--role", choices=("piper", "peer"), help="a process of a run")
    given = parser.parse_args()
    if given.role:
        take_a_step(given)
    else:
        report(given)


def report(given: argparse.Namespace) -> None:
    """Starts take turns, so that a busy moment of the host hits all of them."""
    from common import save  # imports torch, which a process of a run should do by itself

    with tempfile.TemporaryDirectory(prefix="start-up-") as name:
        folder = Path(name)
        for role in ("piper", "peer"):  # writes the cache, and the bytecode
            started(given, role, folder / "full")
        kinds: dict[str, Callable[[int], tuple[float, float]]] = {
            "piper, empty cache": lambda turn: started(given, "piper", folder / f"empty-{turn}"),
            "piper, full cache": lambda _: started(given, "piper", folder / "full"),
            "peer": lambda _: started(given, "peer", folder / "full"),
        }
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for turn in range(given.repeats):
            for kind, measure in kinds.items():
                found[kind].append(measure(turn))
    save(f"start_up{'_gpu' * given.share_gpu}", {"processes": given.processes, "clock, CPU": found})
    for kind, times in found.items():
        clock, cpu = (median(column) for column in zip(*times, strict=True))
        pairs = zip(times, found["peer"], strict=True)
        ratios = [[a / b for a, b in zip(*pair, strict=True)] for pair in pairs]
        by_clock, by_cpu = (median(column) for column in zip(*ratios, strict=True))
        print(f"{kind:20} {clock:6.2f} s ({by_clock:.2f}x), CPU {cpu:6.2f} s ({by_cpu:.2f}x)")


def started(given: argparse.Namespace, role: str, cache: Path) -> tuple[float, float]:
    """Seconds until the end of the first step, and CPU seconds of everything."""
    shared = ["--share-gpu"] if given.share_gpu else []
    by_torch = role == "peer" and not given.share_gpu
    launch = TORCHRUN if by_torch else PIPER_RUN
    sizes = [word for name in SIZES for word in (f"--{name}", str(getattr(given, name)))]
    command = [*launch, str(given.processes), *([] if by_torch else shared), __file__]
    environment = {
        **os.environ, "PIPER_CACHE": str(cache), "OMP_NUM_THREADS": "1",
        "PYTHONPYCACHEPREFIX": str(cache.parent / "bytecode"), "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    before, began = spent(), time.time()
    run = subprocess.run(
        [*command, "--role", role, *sizes, *shared],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line for line in run.stdout.splitlines() if "first step" in line]
    assert said and run.returncode == 0, run.stdout + run.stderr
    return float(said[0].split()[-1]) - began, spent() - before


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def take_a_step(given: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    if given.role == "peer":
        without_piper()
    from models import Staged, batch

    from piper.models.llama import LlamaConfig

    config = LlamaConfig(vocab=given.vocab, dim=given.dim, layers=given.layers, heads=4)
    model = Staged(config, int(os.environ["WORLD_SIZE"]))
    data = batch(config, given.rows, given.length)
    {"piper": by_piper, "peer": by_peer}[given.role](model, data, given.share_gpu)
    if os.environ["RANK"] == "0":
        print(f"first step {time.time()}", flush=True)


def without_piper() -> None:
    """The peer's model is annotated, too, but the peer should not pay for what reads that."""
    annotations: Any = ModuleType("piper.capture")
    annotations.annotate = lambda *where: nullcontext()
    sys.modules["piper.capture"] = annotations


def by_piper(model: Any, data: Any, on_gpu: bool) -> None:
    import torch

    import piper
    from piper.models.llama import cross_entropy

    strategy = piper.strategies.one_f_one_b(pp=len(model.stages), microbatches=PARTS)
    trainer = piper.Trainer(
        model, cross_entropy, strategy, example=data, optimizer=torch.optim.AdamW,
        device="cuda" if on_gpu else "cpu",
    )  # fmt: skip
    float(trainer.step(*data).loss)  # waits for the step


def by_peer(model: Any, data: Any, on_gpu: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from piper.models.llama import cross_entropy

    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    here, count = dist.get_rank(), dist.get_world_size()
    module = model.stages[here].to(device)
    stage = PipelineStage(module, here, count, device)
    schedule = Schedule1F1B(stage, n_microbatches=PARTS, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters())
    tokens, labels = (tensor.to(device) for tensor in data)
    target = {"target": labels} if here == count - 1 else {}
    schedule.step(*([tokens] if here == 0 else []), **target)
    optimizer.step()
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
