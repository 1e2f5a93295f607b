"""The arena of bench/real_peers.py: it also measures memory, and stops in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_kernels import profiled, text

import piper

CHOSEN = 12  # steps after which `graphs="auto"` has chosen


@dataclass
class RealArena(Arena):
    """Contenders of other systems, which find the GPU by LOCAL_RANK."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peaks: dict[str, list[float]] = {}
        self.started = time.perf_counter()
        if self.on_gpu:  # all ranks share it
            local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
            os.environ["LOCAL_RANK"] = str(local)

    def begin(self, group: str) -> None:
        """Results of several sizes are kept side by side."""
        rows = f", {self.size.rows} rows" if self.chosen.rows else ""
        self.group = f"{group}, {self.chosen.size or 'default'}{rows}"
        self.started = time.perf_counter()
        self.say(f"== {self.group}")

    def late(self) -> bool:
        """Ranks decide together, because their clocks differ."""
        return self.most(time.perf_counter() - self.started) > self.chosen.seconds

    def piper(
        self, model: Any, strategy: Any, data: Any, loss: Any = None, **options: Any
    ) -> Contender:
        """Piper as a user writes it first, with every option at its default."""
        trainer = piper.Trainer(
            model, loss or model.loss, strategy, optimizer=self.adamw, example=data,
            device=self.device.type, **options,
        )  # fmt: skip
        return Contender(partial(trainer.step, *data), trainer.close, trainer=trainer)

    def pipers(
        self, model: Any, strategy: Any, data: Any, name: str = "piper"
    ) -> dict[str, Callable[[], Contender]]:
        """Piper with defaults and, on request, without CUDA graphs."""
        if self.chosen.peers_only:
            return {}
        ours: Any = partial(self.piper, model, strategy, data)
        more = {f"{name} eager": partial(ours, graphs=False)} if self.chosen.eager else {}
        return {name: ours, **more}

    def versus(self, entry: str, makers: dict[str, Callable[[], Contender]]) -> None:
        """One contest. Whatever happens in it, the next one starts."""
        if not self.wanted(entry):
            return
        if self.late():
            self.say(f"-- {entry}: left out after {self.chosen.seconds:.0f} s")
            return
        self.say(f"-- {entry}")
        makers = {n: m for n, m in makers.items() if any(o in n for o in self.chosen.only)}
        if self.chosen.kernels:
            self.profile(entry, makers)
            return
        if self.chosen.memory:
            self.weigh(entry, makers)
            return
        self.peaks = {}
        weighed = {name: partial(self.weighed, name, make) for name, make in makers.items()}
        more = {"peak_gib": self.peaks}
        times, _ = self.tried(entry, lambda: self.contest(entry, weighed, more=more))
        for name, seconds in (times or {}).items():
            peak = max(self.peaks.get(name, [0.0]))
            self.say(f"    {name:26} {1e3 * seconds:9.2f} ms   {peak:6.2f} GiB")

    def profile(self, entry: str, makers: dict[str, Callable[[], Contender]]) -> None:
        """Where the time of a step goes on rank 0, by kinds of kernels."""
        for name, make in makers.items():
            self.watch()
            found, reason = self.tried(name, lambda make=make: profiled(self, make(), CHOSEN))
            self.keep(f"{entry}, kernels of {name}", found or {"failed": reason})
            if found:
                self.say(text(name, found))
            self.clean()

    def weigh(self, entry: str, makers: dict[str, Callable[[], Contender]]) -> None:
        """Each contender alone: beside others, the later ones find gaps in their memory."""
        self.peaks, failed = {}, {}
        for name, make in makers.items():
            self.watch()
            one, reason = self.tried(name, partial(self.weighed, name, make))
            if one is None:
                failed[name] = reason
            else:
                one.close()
                self.say(f"    {name:26} {max(self.peaks.get(name, [0.0])):6.3f} GiB")
            del one
            self.clean()
        self.keep(f"{entry}, each alone", {"peak_gib": self.peaks, "failed": failed})

    def weighed(self, name: str, make: Callable[[], Contender]) -> Contender:
        """A contender after its first steps, with the peak memory that it adds to each process."""
        self.clean()
        before = torch.cuda.memory_reserved() if self.on_gpu else 0
        one = make()
        losses = self.losses(one)
        for _ in range(CHOSEN if one.trainer and self.on_gpu else 1):
            one.step()
        if self.on_gpu:
            self.peaks[name] = [round(gib, 3) for gib in self.everywhere(self.peak(one, before))]
        self.say(f"  {name}: losses {[round(loss, 4) for loss in losses]}")
        return one

    def peak(self, one: Contender, before: int) -> float:
        """GiB that a step reserves. Allocated memory would leave out that of CUDA graphs."""
        self.fence()
        self.clean()
        torch.cuda.reset_peak_memory_stats()
        one.step()
        self.fence()
        return float(torch.cuda.max_memory_reserved() - before) / 2**30
