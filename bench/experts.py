"""PP=2 x EP=2: Piper with all-to-alls behind compute, against torch.distributed.pipelining.

    python bench/experts.py [--links normal 180mbit 360mbit] [--routing balanced uneven]

Eight layers with experts on four ranks. All contenders run in turn in the same processes, after
their losses were found equal. Four ranks share two cores here, so compute is emulated
(emulated.py): it takes as long as on its own device. Communication is real. With the defaults and
180mbit it takes about as long as compute, with 360mbit half as long.

    floor       the step time if communication is free: by the table of the schedule, from the costs
    free        the same contender measured on loopback, where communication is almost free
    exposed     what communication adds to the step (step - free), as a share of all communication
    over floor  the same relative to the floor; includes what this machine's two cores cost

Goal: Piper's DualPipeV with overlap is faster than all others, and hides most communication.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import RESULTS, interleaved, ratio, save, show
from emulated import DEVICE, Config, Staged, batch, cross_entropy
from expert_peers import SCHEDULES, SENT, Data, Groups, Step, peer
from floors import makespan, stage_bytes
from links import NORMAL, launch
from pipeline_zero import same_losses
from torch import Tensor, nn

import piper
from piper.directives import Order, Strategy
from piper.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig, moe_loss
from piper.strategies import schedules
from piper.strategies.schedules.table import Table

PP, EP = 2, 2
OURS = "piper dualpipev"
TABLES: dict[str, Callable[[int, int], Table]] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved-1f1b": schedules.interleaved_one_f_one_b,
    "interleaved-zb": schedules.interleaved_zb,
    "zbv": schedules.zbv,
    "dualpipev": schedules.dualpipev,
}
PIPERS: dict[str, tuple[Any, ...]] = {  # contender: schedule, whether slots overlap, ahead
    OURS: ("dualpipev", True),
    "piper dualpipev pairs": ("dualpipev", True, "pairs"),
    "piper dualpipev in turn": ("dualpipev", False),
    "piper 1f1b": ("1f1b", True),
    "piper 1f1b in turn": ("1f1b", False),
    "piper interleaved-1f1b": ("interleaved-1f1b", True),
    "piper zbv": ("zbv", True),
}
PEERS = {f"peer {name}": name for name in SCHEDULES}
SGD = partial(torch.optim.SGD, lr=0.05)


class Cut(nn.Module):
    """Some layers of a Qwen3Moe, for a peer. Auxiliary losses travel with the activations."""

    def __init__(self, model: Qwen3Moe, index: int) -> None:
        super().__init__()
        layers = [k for k in range(model.config.layers) if model.stage(k) == index]
        self.config, self.rotary = model.config, model.rotary
        self.embedding = model.embedding if index == 0 else None
        self.blocks = nn.ModuleList(model.blocks[k] for k in layers)
        last = index == model.stages - 1
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor, side: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = self.rotary(x[..., 0] if x.dim() == 3 else x)
        for block in self.blocks:
            x, side = block(x, cos, sin, side)
        if self.head is None or self.norm is None:
            return x, side
        return self.head(self.norm(x)), side / self.config.moe_layers


class Work:
    """The model, its data and its loss: emulated or real."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.parts = chosen.microbatches
        self.config = Config(
            dim=chosen.dim, time=chosen.time, layers=chosen.layers,
            dense=chosen.dense_ms / 1e3, expert=chosen.expert_ms / 1e3,
            uneven=chosen.routing == "uneven",
        )  # fmt: skip
        self.real = chosen.compute == "real"
        self.qwen = Qwen3MoeConfig(
            vocab=64, dim=chosen.dim, layers=chosen.layers, heads=4, kv_heads=4,
            head_dim=chosen.dim // 4, experts=8, expert_hidden=chosen.dim,
        )  # fmt: skip
        self.loss = moe_loss if self.real else cross_entropy
        whole = batch(self.config.vocab, EP * self.parts, self.config.time)
        self.data: Data = tuple(t.chunk(EP)[dist.get_rank() // PP] for t in whole)

    def model(self, stages: int) -> nn.Module:
        torch.manual_seed(0)
        return Qwen3Moe(self.qwen, stages) if self.real else Staged(self.config, stages)

    def cut(self, stages: int) -> Sequence[nn.Module]:
        model = self.model(stages)
        if isinstance(model, Qwen3Moe):
            return [Cut(model, k) for k in range(stages)]
        assert isinstance(model.stages, nn.ModuleList)
        return list(model.stages)

    @property
    def activation_bytes(self) -> int:
        return self.config.time * self.config.row_bytes


def in_turn(strategy: Strategy) -> Strategy:
    """The same order without overlap: every pass has its own slot."""
    return Strategy(
        tuple(
            Order(tuple((one,) for slot in d.slots for one in slot)) if isinstance(d, Order) else d
            for d in strategy.directives
        )
    )


def piper_step(work: Work, schedule: str, slots: bool, ahead: Any = True) -> Step:
    """A step of Piper, after one call of `tune`, which leaves parameters as they are."""
    build = piper.strategies.BUILDERS[schedule]
    strategy = build(pp=PP, microbatches=work.parts, dp=EP, ep=EP, ahead=ahead)
    if not slots:
        strategy = in_turn(strategy)
    model = work.model(TABLES[schedule](PP, work.parts).stages)
    trainer = piper.Trainer(model, work.loss, strategy, optimizer=SGD, example=work.data)
    trainer.tune(*work.data)
    return lambda: trainer.step(*work.data).loss


def schedule_of(name: str) -> str:
    return PIPERS[name][0] if name in PIPERS else SCHEDULES[PEERS[name]][0]


def contender(name: str, work: Work, groups: Groups) -> Step:
    if name in PIPERS:
        return piper_step(work, *PIPERS[name])
    return peer(PEERS[name], work.cut, work.loss, SGD, work.data, work.parts, groups)


class Counted:
    """A step that counts emulated compute, processor time, and rows sent (by peers)."""

    def __init__(self, step: Step) -> None:
        self.step, self.found = step, [[0.0, 0.0, 0.0, 0.0]]

    def __call__(self) -> float:
        DEVICE.restart()
        before = self.now()
        loss = self.step()
        self.found.append([b - a for a, b in zip(before, self.now(), strict=True)])
        return loss

    def now(self) -> list[float]:
        return [DEVICE.spent, time.process_time(), SENT.bytes, SENT.messages]

    def everywhere(self) -> dict[str, list[float]]:
        """The median step, rank by rank."""
        mine = torch.tensor(self.found[1:], dtype=torch.float64).median(0).values
        all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ranks, mine)
        names = ("compute", "processor", "sent", "messages")
        return dict(zip(names, torch.stack(all_ranks).t().tolist(), strict=True))


def alone(sent: float, messages: float, groups: Groups, width: int, share: int = 8) -> float:
    """Seconds of the all-to-alls of a step alone: some of them are measured, and scaled.

    Half of the messages of a forward are counts of a few bytes, so 4 of 5 messages are rows.
    """
    count = max(1, int(messages * 4 / 5 / share))
    rows = max(1, int(sent / (messages * 4 / 5) / (4 * width)))
    given = torch.zeros(2 * rows, width)
    into, tally = torch.empty_like(given), torch.zeros(EP, 4, dtype=torch.int64)
    dist.barrier()
    started = time.perf_counter()
    for k in range(count):
        if k % 4 == 0:
            dist.all_to_all_single(torch.empty_like(tally), tally, group=groups.out)
        dist.all_to_all_single(into, given, group=groups.out)
    seconds = torch.tensor((time.perf_counter() - started) * share)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


class Strangers:
    """What other programs use of this machine's cores. If that is much, ignore the results."""

    def __init__(self) -> None:
        self.started, self.before = time.perf_counter(), self.busy()

    def busy(self) -> float:
        """Seconds that all cores spent on other programs, or gave to other virtual machines."""
        user, nice, system, _, _, hard, soft, steal, *_ = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        )
        ticks = user + nice + system + hard + soft + steal
        ours = torch.tensor(time.process_time(), dtype=torch.float64)
        dist.all_reduce(ours)
        return ticks / os.sysconf("SC_CLK_TCK") - ours.item()

    def share(self) -> float:
        """The share of all cores since the start. Includes the kernel's work for our links."""
        seconds = (time.perf_counter() - self.started) * (os.cpu_count() or 1)
        return (self.busy() - self.before) / seconds


def bytes_per_second(link: str) -> float:
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return float("inf") if link == NORMAL else float(link[:-4]) * units[link[-4:]] / 8


def without_links(chosen: argparse.Namespace, kind: str) -> dict[str, float]:
    """Step times on loopback, if they were measured with the same settings."""
    file = RESULTS / f"experts_{NORMAL}_{kind}.json"
    if not file.exists():
        return {}
    found = json.loads(file.read_text())["results"]
    same = ("dense_ms", "expert_ms", "dim", "time", "layers", "microbatches")
    alike = all(found["settings"][name] == getattr(chosen, name) for name in same)
    return found["step"] if alike else {}


def headline(
    chosen: argparse.Namespace,
    counted: dict[str, list[float]] | None,
    compute: float,
    exchanges: float,
) -> None:
    """What was run, and communication time relative to compute time."""
    link, routing, rate = chosen.link, chosen.routing, bytes_per_second(chosen.link)
    print(
        f"\n{link}, {routing} routing, {chosen.compute} compute, median of {chosen.repeats}; "
        f"others used {chosen.strangers:.0%} of the cores meanwhile"
    )
    if counted is not None:
        sent = max(counted["sent"])
        print(
            f"per rank and step: compute {compute:.3f} s; exchanges {sent / 1e6:.1f} MB in "
            f"{counted['messages'][0]:.0f} messages, {sent / rate:.3f} s by the rate, "
            f"{exchanges:.3f} s measured alone; ratio {exchanges / compute if compute else 0:.2f}"
        )


def report(chosen: argparse.Namespace, work: Work, times: dict[str, list[float]],
           found: dict[str, dict[str, list[float]]], exchanges: float) -> None:  # fmt: skip
    link, routing = chosen.link, chosen.routing
    kind = f"{routing}_{chosen.microbatches}{'' if chosen.compute == 'emulated' else '_real'}"
    free = {} if link == NORMAL else without_links(chosen, kind)
    counted = next((f for f in found.values() if f["messages"][0]), None)
    compute = max(found[next(iter(found))]["compute"])
    nominal = 3 * work.parts * work.config.layers / PP * (work.config.dense + work.config.expert)
    rate = bytes_per_second(link)
    headline(chosen, counted, compute, exchanges)
    print(
        f"{'':28} {'step':>18} {'floor':>6} {'free':>6} {'exposed':>13} {'over floor':>13} "
        f"{'compute':>7} {'cpu':>6}"
    )
    table: dict[str, dict[str, float]] = {}
    for name, seconds in times.items():
        plan = TABLES[schedule_of(name)](PP, work.parts)
        per_stage = (work.config.dense + work.config.expert) * work.config.layers / plan.stages
        used = max(found[name]["compute"])
        floor = makespan(plan, per_stage) * (used / nominal if nominal else 1.0)
        ordered = sorted(seconds)
        quarter = len(ordered) // 4
        step = statistics.median(ordered)
        transfers = stage_bytes(plan, work.activation_bytes) / rate
        total = exchanges + transfers or float("nan")
        exposed = step - free.get(name, float("nan"))
        cpu = sum(found[name]["processor"]) / (os.cpu_count() or 1)
        table[name] = {
            "floor": floor, "free": free.get(name, float("nan")), "exposed": exposed,
            "exchanges": exchanges, "transfers": transfers, "compute": used, "cpu": cpu,
        }  # fmt: skip
        print(
            f"{name:28} {step:6.3f} [{ordered[quarter]:.2f}-{ordered[-1 - quarter]:.2f}] "
            f"{floor:6.3f} {free.get(name, float('nan')):6.3f} "
            f"{exposed:6.3f} = {exposed / total:4.0%} "
            f"{step - floor:6.3f} = {(step - floor) / total:4.0%} {used:7.3f} {cpu:6.3f}"
        )
    ratios = {name: ratio(times, OURS, name) for name in times if OURS in times and name != OURS}
    for name, one in ratios.items():
        show(f"{link}, dualpipev / {name}", one)
    peers = {n: statistics.median(t) for n, t in times.items() if n in PEERS}
    if peers:
        print(f"best peer: {min(peers, key=lambda n: peers[n])}")
    save(
        f"experts_{link}_{kind}",
        {
            "settings": vars(chosen),
            "step": {name: statistics.median(t) for name, t in times.items()},
            "table": table, "ratios": ratios, "ranks": found, "seconds": times,
        },
    )  # fmt: skip


def steady(link: str) -> None:
    """Switch off pacing (bbr) and slow start after a pause on the link of this rank.

    With them, the same all-to-all takes 10 ms one time and 200 ms another.
    """
    if link != NORMAL:
        for name, value in (("congestion_control", "reno"), ("slow_start_after_idle", "0")):
            Path(f"/proc/sys/net/ipv4/tcp_{name}").write_text(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", nargs="*", default=[NORMAL, "180mbit", "360mbit"])
    parser.add_argument("--routing", nargs="*", default=["balanced"])
    parser.add_argument("--compute", default="emulated", choices=("emulated", "real"))
    parser.add_argument("--dense-ms", type=float, default=10.0)
    parser.add_argument("--expert-ms", type=float, default=10.0)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--time", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--match", nargs="*", default=[], help="contenders whose names contain this"
    )
    parser.add_argument("--link", help=argparse.SUPPRESS)
    chosen, given = parser.parse_args(), sys.argv[1:]
    if "RANK" not in os.environ:
        for routing in chosen.routing:
            for link in chosen.links:
                own = [*given, "--routing", routing, "--link", link]
                launch(str(Path(__file__).resolve()), own, PP * EP, link)
        return
    chosen.routing = chosen.routing[-1]
    steady(chosen.link)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    work, groups = Work(chosen), Groups(PP, EP)
    names = [n for n in (*PIPERS, *PEERS) if not chosen.match or any(o in n for o in chosen.match)]
    steps = {name: Counted(contender(name, work, groups)) for name in names}
    same_losses(steps)
    for step in steps.values():
        step.found.clear()
        step.found.append([])
    strangers = Strangers()
    times = interleaved(steps, chosen.repeats, warmup=0, fence=dist.barrier)
    chosen.strangers = strangers.share()
    found = {name: step.everywhere() for name, step in steps.items()}
    counted = next((f for f in found.values() if f["messages"][0]), None)
    exchanges = 0.0
    if counted is not None:
        mean = sum(counted["sent"]) / len(counted["sent"])
        exchanges = alone(mean, counted["messages"][0], groups, work.config.dim)
    if dist.get_rank() == 0:
        report(chosen, work, times, found, exchanges)
    dist.barrier()


if __name__ == "__main__":
    main()
