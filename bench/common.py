"""Interleaved timing, ratios with their spread, and result files, for all benchmarks."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    repeats: int = 15,
    warmup: int = 3,
    fence: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each. They take turns, so that noise of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(warmup + repeats):
        for name, step in steps.items():
            fence()
            started = clock()
            step()
            fence()
            if turn >= warmup:
                times[name].append(clock() - started)
    return times


def ratio(times: Mapping[str, list[float]], ours: str, theirs: str) -> dict[str, float]:
    """Our time over theirs, turn by turn: median and middle half."""
    pairs = sorted(a / b for a, b in zip(times[ours], times[theirs], strict=True))
    quarter = len(pairs) // 4
    return {
        "median": statistics.median(pairs),
        "low": pairs[quarter],
        "high": pairs[-1 - quarter],
        "ours_ms": 1e3 * statistics.median(times[ours]),
        "theirs_ms": 1e3 * statistics.median(times[theirs]),
    }


def show(name: str, found: Mapping[str, float]) -> None:
    print(
        f"{name:44} {found['median']:.3f}x  [{found['low']:.3f}, {found['high']:.3f}]  "
        f"piper {found['ours_ms']:.1f} ms, peer {found['theirs_ms']:.1f} ms",
        flush=True,
    )


def save(name: str, results: object) -> None:
    """Raw results with the machine they were measured on."""
    RESULTS.mkdir(exist_ok=True)
    machine = {
        "machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),  # of everything that ran in the last minute
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "when": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    text = json.dumps({"on": machine, "results": results}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
