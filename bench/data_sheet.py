"""A data sheet against this GPU: forward and backward of a Llama, predicted and measured.

    python bench/data_sheet.py h200

One microbatch, region by region as the runtime runs them, without communication or optimizer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from capture.interpreter import Interpreter, state  # noqa: E402
from common import save  # noqa: E402

from piper.capture import Captured, capture  # noqa: E402
from piper.costs.devices import DeviceKind, costs_of_device, device_kind  # noqa: E402
from piper.costs.links import NETWORKS  # noqa: E402
from piper.models.llama import Llama, LlamaConfig, cross_entropy  # noqa: E402
from piper.names import B, F  # noqa: E402

SIZES = [(512, 1024), (1024, 1024), (1024, 8192), (2048, 2048), (2048, 8192), (4096, 8192)]


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "h200"
    device, results = device_kind(name), {}
    for dim, tokens in SIZES:
        torch.manual_seed(0)
        config = LlamaConfig(vocab=32_000, dim=dim, layers=4, heads=dim // 64)
        model = Llama(config, stages=2).to("cuda", torch.bfloat16)
        rows = (torch.randint(32_000, (tokens // 1024, 1024), device="cuda") for _ in range(2))
        example = tuple(rows)
        captured = capture(model, cross_entropy, example, device="cuda")
        told, seen = predicted(captured, device), measured(captured, model, example)
        results[f"{dim} {tokens}"] = {"predicted": told, "measured": seen, **work(captured)}
        print(
            f"dim {dim:5} tokens {tokens:5}  predicted {1e3 * told:8.2f} ms  measured "
            f"{1e3 * seen:8.2f} ms  {told / seen - 1:+.0%}  {work(captured)}",
            flush=True,
        )
    save(f"data_sheet_{name}", results)


def predicted(captured: Captured, device: DeviceKind) -> float:
    costs = costs_of_device(device, captured.model, NETWORKS[device.name])
    regions = captured.model.regions
    return sum(costs.region(captured.model, one, phase) for one in regions for phase in (F, B))


def work(captured: Captured) -> dict[str, float]:
    regions = captured.model.regions
    found = [(one.flops, one.traffic, one.operators) for one in regions]
    sums = [sum(part[k][p] for part in found for p in (F, B)) for k in range(3)]
    return dict(zip(("flops", "traffic", "operators"), sums, strict=True))


def measured(
    captured: Captured, model: torch.nn.Module, example: tuple[torch.Tensor, ...]
) -> float:
    interpreter, times = Interpreter(captured, state(model)), []
    for _ in range(12):
        torch.cuda.synchronize()
        started = time.perf_counter()
        interpreter.step(example)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times[4:])[4]


if __name__ == "__main__":
    main()
