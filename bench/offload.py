"""Offload on one GPU: what fits in a limit of memory, what a step takes, and what is hidden.

Every case runs in a process of its own, so that peaks and failures are its own. Beside Piper runs
FSDP2 with its `CPUOffloadPolicy`, on the same modules. A last part repeats two cases with less
memory than the first of them needs.

    python bench/offload.py
    python bench/offload.py --only kept "parameters, optimizer" fsdp2 "fsdp2, CPUOffloadPolicy"
    python bench/offload.py --device cpu --layers 3 --dim 64 --hidden 128 --rows 2 --time 32
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import save
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import piper
from piper import Offload, Place, Remat, Strategy, annotate, where
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.runtime import host_memory

PLACE = Place(where(), [0])
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4, fused=True)
Case = tuple[Strategy, str]  # and the case without offload that it is compared with


def cases(layers: int) -> dict[str, Case]:
    some = where(PP=range(1, layers + 1, 3))
    far = {"ahead": 4, "buffers": 4}
    return {
        "kept": (Strategy([PLACE]), "kept"),
        "activations": (Strategy([PLACE, Offload(where())]), "kept"),
        "activations of each third layer": (Strategy([PLACE, Offload(some, **far)]), "kept"),
        "remat": (Strategy([PLACE, Remat(where())]), "remat"),
        "remat, activations": (Strategy([PLACE, Remat(where()), Offload(where())]), "remat"),
        "optimizer": (Strategy([PLACE, Offload(where(), "optimizer")]), "kept"),
        "optimizer, far ahead": (Strategy([PLACE, Offload(where(), "optimizer", **far)]), "kept"),
        "parameters": (Strategy([PLACE, Offload(where(), "parameters")]), "kept"),
        "parameters, optimizer": (Strategy([PLACE, *state({})]), "kept"),
        "parameters, optimizer, far ahead": (Strategy([PLACE, *state(far)]), "kept"),
        "remat, activations, optimizer": (
            Strategy([PLACE, Remat(where()), Offload(where()), state(far)[1]]), "remat",
        ),
        "remat, all": (Strategy([PLACE, Remat(where()), Offload(where()), *state(far)]), "remat"),
    }  # fmt: skip


def state(far: dict[str, int]) -> list[Offload]:
    """What FSDP2's policy moves, but for gradients."""
    return [Offload(where(), "parameters"), Offload(where(), "optimizer", **far)]


PEERS = {"fsdp2": False, "fsdp2, CPUOffloadPolicy": True}


def config(chosen: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab=chosen.vocab, dim=chosen.dim, layers=chosen.layers, heads=chosen.dim // 32
        if chosen.dim < 1024 else chosen.dim // 128, hidden=chosen.hidden,
    )  # fmt: skip


class Units(Llama):
    """Regions as FSDP2 has units here: the embedding, each layer, the head."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rotary(tokens)
        with annotate("PP", 0):
            x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            with annotate("PP", 1 + layer):
                x = block(x, cos, sin)
        with annotate("PP", 1 + len(self.blocks)):
            logits: torch.Tensor = self.head(self.norm(x))
            return logits


def on_meta(chosen: argparse.Namespace) -> Units:
    with torch.device("meta"):
        return Units(config(chosen))


def batch(chosen: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(chosen.vocab, (chosen.rows, chosen.time + 1), generator=draw)
    tokens = tokens.to(chosen.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


PATTERN = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))


def fill(name: str, tensor: torch.Tensor) -> None:
    """Quickly: random numbers that repeat. Norms are ones."""
    if tensor.dim() < 2:
        tensor.fill_(1.0)
        return
    flat = tensor.view(-1)
    for part in flat.split(PATTERN.numel()):
        part.copy_(PATTERN[: part.numel()])


def synchronize(chosen: argparse.Namespace) -> None:
    if chosen.device == "cuda":
        torch.cuda.synchronize()


def measured(chosen: argparse.Namespace, step: Callable[[], float]) -> dict[str, Any]:
    """Step time and peak memory, after two steps that allocate everything."""
    losses = [step() for _ in range(2)]
    if chosen.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(chosen.steps):
        synchronize(chosen)
        started = time.perf_counter()
        losses.append(step())
        synchronize(chosen)
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if chosen.device == "cuda" else 0
    return {"seconds": statistics.median(times), "peak": peak, "losses": losses}


def counting_copies() -> Counter[str]:
    """Bytes that are copied from now on, by direction."""
    found: Counter[str] = Counter()
    for kind in (host_memory.OtherMemory, host_memory.PinnedMemory):
        for way in ("store", "fetch"):
            setattr(kind, way, counted(getattr(kind, way), way, found))
    return found


def counted(start: Callable[..., Any], way: str, found: Counter[str]) -> Callable[..., Any]:
    def copy(self: Any, value: Any, stream: str, *pages: Any) -> Any:
        tensors = [value] if isinstance(value, torch.Tensor) else list(value)
        found[way] += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return start(self, value, stream, *pages)

    return copy


def ours(chosen: argparse.Namespace) -> dict[str, Any]:
    copied = counting_copies()
    strategy, _ = cases(chosen.layers)[chosen.case]
    example = batch(chosen)
    trainer = piper.Trainer(
        on_meta(chosen), cross_entropy, strategy, example=example, optimizer=OPTIMIZER,
        precision="bf16", init=fill, device=chosen.device, compiled=chosen.compiled,
        graphs=False,
    )  # fmt: skip
    before = Counter[str]()

    def step() -> float:
        nonlocal before
        before = Counter(copied)
        return float(trainer.step(*example).loss)

    found = measured(chosen, step)
    bytes_of_a_step = {way: copied[way] - before[way] for way in ("store", "fetch")}
    trainer.close()
    return {**found, "copied": bytes_of_a_step}


def theirs(chosen: argparse.Namespace) -> dict[str, Any]:
    """FSDP2 on one rank: each layer is a unit."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    backend = "cuda:nccl,cpu:gloo" if chosen.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, rank=0, world_size=1)
    offloads = PEERS[chosen.case]
    policy: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
    if offloads:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=chosen.device == "cuda")
    model = on_meta(chosen)
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    model.to_empty(device="cpu" if offloads else chosen.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter.to_local())
    optimizer = OPTIMIZER(model.parameters())
    tokens, labels = batch(chosen)

    def step() -> float:
        loss = cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    found = measured(chosen, step)
    torch.distributed.destroy_process_group()
    return found


def bandwidth(chosen: argparse.Namespace) -> dict[str, float]:
    """Bytes a second to and from the host, one direction at a time."""
    if chosen.device != "cuda":
        return {"store": 1e9, "fetch": 1e9}
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    found = {}
    for way, (into, source) in {"store": (host, there), "fetch": (there, host)}.items():
        into.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(4):
            into.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found[way] = 4 * host.numel() / (time.perf_counter() - started)
    return found


def run_case(chosen: argparse.Namespace) -> None:
    """One case, in this process."""
    if chosen.limit_gib and chosen.device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(chosen.limit_gib * 2**30 / whole)
    if chosen.exact:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    if chosen.case == "bandwidth":
        found: dict[str, Any] = dict(bandwidth(chosen))
    else:
        found = (theirs if chosen.case in PEERS else ours)(chosen)
    print(f"FOUND {json.dumps(found)}", flush=True)


def apart(chosen: argparse.Namespace, case: str, *more: str) -> dict[str, Any]:
    """One case in a process of its own, or why it failed."""
    command = [sys.executable, __file__, *sys.argv[1:], "--case", case, *more]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=chosen.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"it took more than {chosen.timeout:.0f} s"}
    for row in done.stdout.splitlines():
        if row.startswith("FOUND "):
            took = {"whole": time.perf_counter() - started}
            return {**json.loads(row.removeprefix("FOUND ")), **took}
    reason = [row for row in done.stderr.splitlines() if row.strip()][-1:] or ["no output"]
    kind = "out of memory" if "out of memory" in done.stderr.lower() else reason[0][:300]
    return {"failed": kind}


def hidden(case: dict[str, Any], base: dict[str, Any], speed: dict[str, float]) -> float | None:
    """The share of the copies that a step does not wait for. Both directions run at once."""
    copied = case.get("copied", {})
    seconds = max((copied[way] / speed[way] for way in copied), default=0.0)
    if not seconds or "seconds" not in base:
        return None
    return max(0.0, min(1.0, 1 - (case["seconds"] - base["seconds"]) / seconds))


def text(name: str, found: dict[str, Any], base: dict[str, Any], speed: dict[str, float]) -> str:
    if "failed" in found:
        return f"{name:34} {found['failed']}"
    share = hidden(found, base, speed)
    copied = sum(found.get("copied", {}).values())
    return (
        f"{name:34} {1e3 * found['seconds']:8.1f} ms  peak {found['peak'] / 2**30:6.2f} GiB"
        f"  copied {copied / 2**30:6.2f} GiB"
        + (f"  hidden {100 * share:3.0f} %" if share is not None else "")
        + f"  loss {found['losses'][-1]:.6f}  in all {found['whole']:.0f} s"
    )


def run_all(chosen: argparse.Namespace) -> None:
    speed = apart(chosen, "bandwidth")
    if "failed" in speed:
        raise SystemExit(f"bandwidth: {speed['failed']}")
    print(f"store {speed['store'] / 1e9:.1f} GB/s, fetch {speed['fetch'] / 1e9:.1f} GB/s")
    results: dict[str, Any] = {"bandwidth": speed}
    names = [name for name in (*cases(chosen.layers), *PEERS) if name not in chosen.skip]
    names = [name for name in names if not chosen.only or name in chosen.only]
    for name in names:
        results[name] = apart(chosen, name)
        _, base = cases(chosen.layers).get(name, (None, name))
        print(text(name, results[name], results.get(base, {}), speed), flush=True)
    print(agreement([r for n, r in results.items() if n in cases(chosen.layers)]))
    results["limited"] = {} if chosen.only else limited(chosen, results)
    save("offload", results)


def agreement(found: list[dict[str, Any]]) -> str:
    """Atomic additions of kernels give other bits in every run, unless --exact forbids them."""
    losses = [torch.tensor(one["losses"], dtype=torch.float64) for one in found if "losses" in one]
    apart = max(((one - losses[0]).abs() / losses[0].abs()).max().item() for one in losses)
    return f"losses of Piper's cases: {f'at most {apart:.1e} apart' if apart else 'equal bits'}"


def limited(chosen: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """Less memory than the kept one needs, and enough for each kind of offload."""
    found: dict[str, Any] = {}
    for name in ("optimizer", "remat, activations", "remat, all"):
        _, base = cases(chosen.layers)[name]
        if not all("peak" in results.get(one, {}) for one in (name, base)):
            continue
        low, high = results[name]["peak"], results[base]["peak"]
        limit = (low + 0.6 * (high - low)) / 2**30
        for one in (base, name) if low < high else ():
            limited = apart(chosen, one, "--limit-gib", f"{limit:.3f}", "--steps", "2")
            found[f"{one} in {limit:.1f} GiB"] = limited
            outcome = limited.get("failed") or f"trains, loss {limited['losses'][-1]:.6f}"
            print(f"{one:34} in {limit:.1f} GiB: {outcome}", flush=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--time", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--case", default="")
    parser.add_argument("--exact", action="store_true", help="deterministic kernels: equal bits")
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[], help="these cases and nothing else")
    parser.add_argument("--limit-gib", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=150.0)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = arguments()
    run_case(chosen) if chosen.case else run_all(chosen)
