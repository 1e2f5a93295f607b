"""Exact on GPUs, too: train under a strategy with NCCL, and plainly on one GPU, and compare.

    piper run -n 4 --share-gpu tests/scripts/on_gpus.py          # all on one GPU
    piper run -n 4 tests/scripts/on_gpus.py --dtype bfloat16     # a GPU for each

Every replica and microbatch has other data; three AdamW steps; losses, norms and parameters. Where
regions are recomputed, results are also compared bit by bit with those of keeping everything. After
all schedules come features (features.py), in float32, and mixed precision (precisions.py). With
PIPER_DEVICE=cpu it runs without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import features
import precisions
import torch
import torch.distributed as dist
from shared_capture import using
from torch import Tensor, nn

import piper
from piper.capture import Captured, capture
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.models.qwen3_moe import PRESETS, Qwen3Moe, moe_loss

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
MIXED = "mixed"  # with limits of its own
LIMITS = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 6e-2}
PARTS, LENGTH, STEPS = 4, 16, 3
DEVICE = os.environ.get("PIPER_DEVICE", "cuda")
EP_SHARE = (piper.Stream("ep", sms=4, priority="high"), piper.Stream("pp", priority="high"))
HALF = (piper.Stream("compute", sms=64),)  # of an H200
AWAY = ("activations", "optimizer")  # in host memory
ALL_AWAY = (*AWAY, "parameters")
KEEP = (True, "matmuls", "attention", 0.5)  # what recomputed regions keep
HOW = ("eager", "graphs", "compiled", "compiled+graphs")
TWO_EACH = ("zbv", "dualpipev", "interleaved-1f1b", "interleaved-zb")  # stages per device
Case = tuple[str, str, dict[str, Any]]  # model, schedule, options
Run = Callable[[], dict[str, float]]
CASES: dict[int, list[Case]] = {
    1: [
        ("llama", "1f1b", {"pp": 1}),
        ("moe", "1f1b", {"pp": 1}),
        ("llama", "1f1b", {"pp": 1, "streams": HALF}),
        *(("llama", "1f1b", {"pp": 1, "remat": keep}) for keep in KEEP),
        ("moe", "1f1b", {"pp": 1, "remat": "matmuls"}),
        ("llama", "gpipe", {"pp": 1, "offload": AWAY}),
        ("moe", "gpipe", {"pp": 1, "offload": AWAY, "remat": True}),
        ("llama", "gpipe", {"pp": 1, "offload": "parameters"}),
        ("moe", "gpipe", {"pp": 1, "offload": ALL_AWAY, "remat": True}),
    ],
    2: [
        ("llama", "1f1b", {"pp": 2}),
        ("llama", "zbv", {"pp": 2}),
        ("llama", "dualpipev", {"pp": 2}),
        *(("llama", "1f1b", {"pp": 1, "dp": 2, "zero": zero}) for zero in range(4)),
        ("moe", "1f1b", {"pp": 1, "dp": 2, "ep": 2, "zero": 1}),
        ("llama", "zbv", {"pp": 2, "remat": True}),
        ("llama", "gpipe", {"pp": 2, "offload": AWAY}),
        ("moe", "gpipe", {"pp": 1, "dp": 2, "ep": 2, "zero": 1, "offload": AWAY}),
        *(("llama", "1f1b", {"pp": 1, "dp": 2, "zero": z, "offload": ALL_AWAY}) for z in range(4)),
        ("llama", "zbv", {"pp": 2, "offload": "parameters"}),
        ("llama", "1f1b", {"pp": 1, "dp": 2, "zero": 3, "remat": 0.5}),
        ("moe", "1f1b", {"pp": 1, "dp": 2, "ep": 2, "zero": 1, "remat": True}),
        *(("llama", "1f1b", {"pp": 1, way: 2}) for way in ("tp", "cp")),
        ("llama", "1f1b", {"pp": 1, "cp": 2, "cp_attention": "ring"}),
    ],
    4: [
        *(("llama", name, {"pp": 4}) for name in ("gpipe", "1f1b", "zb-h1")),
        *(("llama", "dualpipev", {"pp": 2, "dp": 2, "zero": zero}) for zero in range(4)),
        ("llama", "interleaved-1f1b", {"pp": 2, "dp": 2, "zero": 2, "reduce": "each"}),
        ("llama", "1f1b", {"pp": 2, "dp": 2, "zero": 3, "reduce": "once"}),
        ("llama", "dualpipe", {"pp": 2, "dp": 2, "zero": 0}),
        ("llama", "dualpipe", {"pp": 2, "dp": 2, "zero": 3}),
        ("untied", "dualpipe", {"pp": 2, "dp": 2, "zero": 3}),
        ("moe", "dualpipev", {"pp": 2, "dp": 2, "ep": 2, "zero": 1}),
        ("moe", "1f1b", {"pp": 2, "dp": 2, "ep": 2, "zero": 3}),
        ("moe", "zbv", {"pp": 1, "dp": 4, "ep": 2, "zero": 2, "reduce": "each"}),
        ("moe", "dualpipev", {"pp": 2, "dp": 2, "ep": 2, "streams": EP_SHARE}),
        ("moe", "dualpipev", {"pp": 2, "dp": 2, "ep": 2, "ahead": "pairs"}),
        ("llama", "dualpipev", {"pp": 2, "dp": 2, "zero": 3, "remat": "attention"}),
        ("llama", "interleaved-zb", {"pp": 2, "dp": 2, "zero": 2, "remat": [0, 3]}),
        ("moe", "dualpipev", {"pp": 2, "dp": 2, "ep": 2, "zero": 1, "remat": 0.5}),
        ("llama", "dualpipev", {"pp": 2, "dp": 2, "zero": 3, "offload": AWAY}),
        ("llama", "dualpipev", {"pp": 2, "dp": 2, "zero": 3, "offload": ALL_AWAY}),
        ("moe", "dualpipev", {"pp": 2, "dp": 2, "ep": 2, "zero": 0, "offload": ALL_AWAY}),
        ("untied", "1f1b", {"pp": 1, "tp": 4}),
        ("llama", "zbv", {"pp": 2, "tp": 2}),
        ("llama", "1f1b", {"pp": 1, "tp": 2, "dp": 2, "zero": 3}),
        ("llama", "dualpipev", {"pp": 2, "cp": 2}),
        ("llama", "dualpipev", {"pp": 2, "cp": 2, "cp_attention": "zigzag"}),
    ],
}


@functools.cache
def build(name: str, stages: int, dtype: torch.dtype) -> tuple[nn.Module, Any, int]:
    torch.manual_seed(1)
    if name in ("llama", "untied"):
        tied = name == "llama"
        config = LlamaConfig(vocab=64, dim=32, heads=2, layers=max(stages, 4), tied=tied)
        return Llama(config, stages=stages).to(dtype), cross_entropy, 64
    config = PRESETS["tiny"]
    return Qwen3Moe(config, stages).to(dtype), moe_loss, config.vocab


@functools.cache
def captured(name: str, stages: int, dtype: torch.dtype, rows: int) -> Captured:
    model, loss_fn, vocab = build(name, stages, dtype)
    return capture(model, loss_fn, batches(vocab, rows)[0], DEVICE)


def batches(vocab: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    cuts = [torch.randint(vocab, (rows, LENGTH + 1), generator=generator) for _ in range(STEPS)]
    return [(cut[:, :-1].contiguous(), cut[:, 1:].contiguous()) for cut in cuts]


def plainly(model: nn.Module, loss_fn: Any, data: list[tuple[Tensor, Tensor]], parts: int) -> Any:
    """One GPU, eager autograd; microbatch by microbatch, as a user would accumulate."""
    model = copy.deepcopy(model).to(DEVICE)
    optimizer, found = ADAMW(model.parameters()), []
    for tokens, labels in data:
        losses = []
        for some, wanted in zip(tokens.chunk(parts), labels.chunk(parts), strict=True):
            loss = loss_fn(model(some.to(DEVICE)), wanted.to(DEVICE)) / parts
            loss.backward()
            losses.append(loss.detach())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.double().norm() for g in grads]).norm().item()
        found.append((sum(losses).item(), norm))
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: value.cpu() for name, value in model.state_dict().items()}


def far(found: float, wanted: float) -> float:
    return abs(found - wanted) / max(abs(wanted), 1e-9)


def compared(case: Case, dtype: str, how: str) -> dict[str, float]:
    name, schedule, options = case
    stages = options["pp"] * (2 if schedule in TWO_EACH else 1)
    model, loss_fn, vocab = build(name, stages, getattr(torch, dtype))
    seen, whole, replicas = trained(case, dtype, how)
    data = batches(vocab, 2 * PARTS * replicas)
    wanted, parameters = plainly(model, loss_fn, data, PARTS * replicas)
    errors = {
        "loss": max(far(m[0], loss) for m, (loss, _) in zip(seen, wanted, strict=True)),
        "norm": max(far(m[1], norm) for m, (_, norm) in zip(seen, wanted, strict=True)),
    }
    if whole is not None:
        far_off = {
            n: ((whole[n].double() - p.double()).norm() / p.double().norm().clamp(min=1e-9)).item()
            for n, p in parameters.items()
        }
        worst = max(far_off, key=far_off.__getitem__)
        errors["parameters"] = far_off[worst]
        if errors["parameters"] > LIMITS[dtype]:
            print(f"farthest: {worst}, plainly {parameters[worst].flatten()[:4].tolist()}")
    if ("remat" in options or "offload" in options) and "compiled" not in how:
        errors["bits"] = float(not same_bits(case, dtype, how, (seen, whole)))
    return errors


def same_bits(case: Case, dtype: str, how: str, found: Any) -> bool:
    """As with everything kept; if not, whether that differs from run to run."""
    name, schedule, options = case
    changed = ("remat", "offload")
    rest = {key: value for key, value in options.items() if key not in changed}
    kept = (name, schedule, rest)
    first = trained(kept, dtype, how)[:2]
    if agreed(equal(found, first)):
        return True
    return not agreed(equal(trained(kept, dtype, how)[:2], first))


def agreed(fine: bool) -> bool:
    """What the first device says, which alone has all parameters."""
    said = [fine]
    if dist.is_initialized():
        dist.broadcast_object_list(said)
    return said[0]


def equal(one: Any, other: Any) -> bool:
    """Losses and norms of all steps, and parameters on the first device."""
    (seen, whole), (others, rest) = one, other
    return seen == others and all(torch.equal(whole[n], rest[n]) for n in whole or ())


def trained(case: Case, dtype: str, how: str) -> tuple[list[Any], dict[str, Tensor] | None, int]:
    """Losses and norms of every step, parameters on the first device, the number of replicas."""
    name, schedule, options = case
    stages = options["pp"] * (2 if schedule in TWO_EACH else 1)
    model, loss_fn, vocab = build(name, stages, getattr(torch, dtype))
    streams = options.get("streams", ())
    options = {key: value for key, value in options.items() if key != "streams"}
    strategy = piper.strategies.BUILDERS[schedule](microbatches=PARTS, **options) + list(streams)
    rows = 1 if schedule == "dualpipe" else 2
    first = os.environ.get("RANK", "0") == "0"  # which captures for all
    known = captured(name, stages, getattr(torch, dtype), rows) if first else None
    with using(known):
        trainer = piper.Trainer(
            copy.deepcopy(model), loss_fn, strategy, optimizer=ADAMW, device=DEVICE,
            example=tuple(t[: PARTS * 2] for t in batches(vocab, PARTS * 2)[0]), **options_of(how),
        )  # fmt: skip
    rows = 2 * PARTS
    data = batches(vocab, rows * trainer.replicas)
    start = rows * trainer.replica
    steps = [trainer.step(*(t[start : start + rows] for t in batch)) for batch in data]
    seen = [(metrics.loss, metrics.grad_norm) for metrics in steps]
    whole = trainer.state_dict()
    trainer.close()
    return seen, whole, trainer.replicas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=LIMITS)
    parser.add_argument("--how", nargs="+", default=["eager", "graphs"], choices=HOW)
    parser.add_argument("--match", default="")  # Inductor reads an `--only` of any script
    parser.add_argument("--patience", type=float, default=60.0, help="then say where it hangs")
    chosen = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    named = [entry for entry in entries(chosen.dtype, chosen.how) if chosen.match in entry[0]]
    wrong = [name for name, dtype, run in named if not is_equal(name, dtype, run, chosen.patience)]
    if wrong:
        raise SystemExit(f"{len(wrong)} differ from plain PyTorch: {wrong}")


def entries(dtypes: list[str], hows: list[str]) -> Iterator[tuple[str, str, Run]]:
    world = piper_world()
    for dtype, how in itertools.product(dtypes, hows):
        for case in CASES[world]:
            name = f"{dtype} {how} {case[0]} {case[1]} {case[2]}"
            yield name, dtype, functools.partial(compared, case, dtype, how)
    for how in hows if "float32" in dtypes else []:
        for name in features.wanted(world):
            run = functools.partial(features.compared, name, world, DEVICE, **options_of(how))
            yield f"float32 {how} feature: {name}", "float32", run
    for how, name in itertools.product(hows, precisions.names(world)):
        run = functools.partial(precisions.compared, name, world, DEVICE, **options_of(how))
        yield f"{how} precision: {name}", MIXED, run


def is_equal(name: str, dtype: str, run: Run, patience: float) -> bool:
    faulthandler.dump_traceback_later(patience, exit=True)
    started = time.perf_counter()
    errors = run()
    seconds = time.perf_counter() - started
    fine = all(error <= limit(dtype, what) for what, error in errors.items())
    if not dist.is_initialized() or dist.get_rank() == 0:
        text = "  ".join(f"{what} {error:.1e}" for what, error in errors.items())
        print(f"{'ok   ' if fine else 'WRONG'} {name:66} {text}  {seconds:.1f} s", flush=True)
    return fine


def options_of(how: str) -> dict[str, bool]:
    return {"graphs": "graphs" in how, "compiled": "compiled" in how}


def limit(dtype: str, what: str) -> float:
    """The models' losses are float32, whatever the rest is."""
    if dtype == MIXED:
        return 0.0 if what.startswith(("bits", "skipped")) else 1.0
    if what == "bits":
        return 0.0
    return max(LIMITS[dtype], 2e-7) if what == "loss" else LIMITS[dtype]


def piper_world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


if __name__ == "__main__":
    main()
