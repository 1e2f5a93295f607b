"""Run the contenders of bench/gpu.py in turn in the same processes, after equal losses."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import platform
import re
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import RESULTS, interleaved, ratio, save, show
from gpu_models import SIZES, Shelf, Size
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import piper
from piper.runtime.hardware import chosen_device
from piper.runtime.processes.world import join

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 1e-4}  # relative tolerance of a loss
TURNS = 3  # steps whose losses are compared; from the second on they depend on gradients


@dataclass
class Contender:
    """Something that takes steps; `step` returns its loss in some form, if it knows one."""

    step: Callable[[], Any]
    close: Callable[[], object] = lambda: None
    kept: bool = False  # it is used again after this contest
    first: list[float] | None = None  # the losses of its first steps
    trainer: piper.Trainer | None = None
    parameters: list[torch.Tensor] = field(default_factory=list)  # of a peer, those on this rank
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)  # of a peer

    @property
    def lasting(self) -> list[torch.Tensor]:
        """What outlives a step, except optimizer state, and gather buffers, empty by then."""
        if self.trainer is None:
            return self.parameters
        state = self.trainer._programs.state
        held = [tensor for bucket in state.buckets.values() for tensor in bucket.tensors]
        return [*held, *(buffer.flat for buffer in state.buffers.values())]


Makers = Mapping[str, Callable[[], Contender]]


def loss_of(found: Any) -> float:
    """NaN if the last stage is not on this rank."""
    if isinstance(found, torch.Tensor):
        return found.item()
    return float(getattr(found, "loss", found))


@dataclass
class Arena:
    """This process, the options, and the file of results."""

    chosen: argparse.Namespace
    group: str = ""
    meshes: dict[tuple[int, ...], DeviceMesh] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = chosen_device()
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            torch.cuda.init()  # before a mesh, which would take the GPU numbered like this rank
        self.rank = join(600.0, self.on_gpu)
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        torch.set_num_threads(1)
        self.dtype = DTYPES[self.chosen.dtype or ("bf16" if self.on_gpu else "fp32")]
        size = SIZES[self.chosen.size or ("medium" if self.on_gpu else "tiny")]
        self.size: Size = replace(size, rows=self.chosen.rows or size.rows)
        self.shelf = Shelf(self.device, self.dtype)
        self.out = str(self.chosen.out or RESULTS / f"gpu_{self.machine()}").removesuffix(".json")
        fused = {"fused": True} if self.chosen.fused else {}
        self.adamw = partial(torch.optim.AdamW, lr=3e-4, **fused)

    def machine(self) -> str:
        name = torch.cuda.get_device_name() if self.on_gpu else f"cpu {platform.machine()}"
        return re.sub(r"\W+", "_", name.lower())

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def fence(self) -> None:
        """Wait until all devices are idle. Uses gloo, which needs no GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()
        if self.world > 1:
            dist.all_reduce(torch.zeros(1))

    def most(self, number: float) -> float:
        """The largest of all ranks."""
        return max(self.everywhere(number))

    def everywhere(self, number: float) -> list[float]:
        if self.world == 1:
            return [number]
        mine = torch.tensor([number], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine)
        return [one.item() for one in found]

    def watch(self) -> None:
        """From now on, an entry that hangs ends the run and says where."""
        faulthandler.dump_traceback_later(self.chosen.patience, exit=True)

    def wanted(self, entry: str) -> bool:
        match, skip = self.chosen.match, self.chosen.skip
        return (not match or any(o in entry for o in match)) and not any(s in entry for s in skip)

    def keep(self, entry: str, found: object) -> None:
        """Write it now, beside the results of other groups and runs in the file."""
        if self.rank:
            return
        path = Path(f"{self.out}.json")
        before = json.loads(path.read_text())["results"] if path.exists() else {}
        chosen = {key: value for key, value in vars(self.chosen).items() if key != "out"}
        settings = {**chosen, "world": self.world, "device": self.device.type}
        settings |= {"size": asdict(self.size), "dtype": str(self.dtype)}
        entries = before.setdefault(self.group, {"entries": {}})
        entries["settings"] = settings
        entries["entries"][entry] = found
        path.parent.mkdir(parents=True, exist_ok=True)
        save(self.out, before)

    def ours(self, model: Any, strategy: Any, data: Any, **options: Any) -> Contender:
        """Piper."""
        trainer = piper.Trainer(
            model, model.loss, strategy, optimizer=self.adamw, example=data,
            device=self.device.type, **{"graphs": False, **options},
        )  # fmt: skip
        return Contender(partial(trainer.step, *data), trainer.close, trainer=trainer)

    def both(
        self, model: Any, strategy: Any, data: Any, name: str = "piper"
    ) -> dict[str, Callable[[], Contender]]:
        """Piper, and Piper with CUDA graphs if there is a GPU."""
        plain = partial(self.ours, model, strategy, data)
        return {name: plain} | (
            {f"{name} graphs": partial(plain, graphs=True)} if self.on_gpu else {}
        )

    def mesh(self, *shape: int) -> DeviceMesh:
        """Made once, because every mesh has its own communicators."""
        if shape not in self.meshes:
            names = ("dp", "pp")[: len(shape)]
            self.meshes[shape] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self.meshes[shape]

    def losses(self, one: Contender, turns: int = TURNS) -> list[float]:
        """Losses of the first steps: the mean over the ranks that know one."""
        if one.first is not None:
            return one.first
        rows = [[loss_of(one.step()), 1.0] for _ in range(turns)]
        found = torch.tensor(rows, dtype=torch.float64)
        found[found[:, 0].isnan()] = 0.0
        if self.world > 1:
            dist.all_reduce(found)
        one.first = (found[:, 0] / found[:, 1]).tolist()
        return one.first

    def tried(self, what: str, make: Callable[[], Any]) -> tuple[Any, str]:
        """The result, or why there is none. A failure on one rank fails on all."""
        found, reason = None, ""
        try:
            found = make()
        except Exception as error:
            reason = "".join(traceback.format_exception_only(error)).strip() or "failed"
            print(f"  rank {self.rank}: {what}: {reason[:600]}", flush=True)  # others may hang now
            if self.chosen.verbose:
                traceback.print_exc()
        if self.most(float(bool(reason))):
            self.say(f"  {what} FAILED")
            return None, reason or "failed on another rank"
        return found, ""

    def enter(self, makers: Makers) -> tuple[dict[str, Contender], dict[str, Any]]:
        """Make all contenders, and compare their first losses."""
        contenders: dict[str, Contender] = {}
        notes: dict[str, Any] = {"losses": {}, "failed": {}, "unequal": [], "made_s": {}}
        for name, make in makers.items():
            self.watch()
            started = time.perf_counter()
            one, reason = self.tried(name, make)
            if one is not None:
                losses, reason = self.tried(f"{name}, first steps", partial(self.losses, one))
            if reason:
                notes["failed"][name] = reason
                if one is not None:
                    one.close()
                self.clean()
                continue
            notes["made_s"][name] = time.perf_counter() - started
            notes["losses"][name] = losses
            contenders[name] = one
        self.compare(notes)
        return contenders, notes

    def compare(self, notes: dict[str, Any]) -> None:
        """Mark contenders that compute something else."""
        expected = next(iter(notes["losses"].values()), [])
        for name, losses in notes["losses"].items():
            pairs = zip(losses, expected, strict=False)
            worst = max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)
            if not worst < TOLERANCE[self.dtype]:
                notes["unequal"].append(name)
                self.say(f"  LOSSES DIFFER: {name} {losses}, expected {expected}")

    def contest(
        self,
        entry: str,
        makers: Makers,
        pairs: Sequence[tuple[str, str]] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Medians in seconds. `pairs` are the ratios to show, by default Piper over others."""
        if not self.wanted(entry):
            return {}
        started = time.perf_counter()
        contenders, notes = self.enter(makers)
        self.watch()
        steps = {name: one.step for name, one in contenders.items()}
        times = interleaved(steps, self.chosen.repeats, warmup=1, fence=self.fence)
        pairs = pairs or [(a, b) for a in makers for b in makers if is_ours(a) and not is_ours(b)]
        ratios = {}
        for a, b in pairs:
            if a in times and b in times:
                ratios[f"{a} / {b}"] = ratio(times, a, b)
                mark = " (LOSSES DIFFER)" if {a, b} & set(notes["unequal"]) else ""
                if self.rank == 0:
                    where = "" if entry in (a, b) else f"{entry}: "
                    show(f"{where}{a} / {b}{mark}", ratios[f"{a} / {b}"])
        self.keep(entry, {"ratios": ratios, "seconds": times, **notes, **(more or {})})
        for one in contenders.values():
            if not one.kept:
                one.close()
        del contenders, steps
        self.clean()
        faulthandler.cancel_dump_traceback_later()
        self.say(f"  {entry}: {time.perf_counter() - started:.0f} s in all")
        return {name: statistics.median(found) for name, found in times.items()}

    def clean(self) -> None:
        """Workspaces of products too: else the first contender would pay for those of all."""
        gc.collect()
        if self.on_gpu:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def is_ours(name: str) -> bool:
    return name.startswith("piper")
