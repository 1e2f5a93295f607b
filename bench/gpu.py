"""Piper beside its peers on one GPU that four ranks share, or on one device.

    piper run -n 4 --share-gpu bench/gpu.py --group dp pp ep memory host
    piper run -n 4 --share-gpu bench/gpu.py --group room --vary rows length layers
    python bench/gpu.py --group one
    PIPER_DEVICE=cpu piper run -n 4 bench/gpu.py --group dp pp ep memory host      (tiny sizes)

Piper and a peer live in the same processes and take steps in turn. A ratio is Piper's time over the
peer's, turn by turn. The losses of their first steps are compared first, and a contender that
computes something else is marked. A contender that fails is named and left out. Each entry goes
into the results file as soon as it is done. An entry that hangs ends the run after --patience
seconds and says where: start again with --skip and its name.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from gpu_arena import DTYPES, Arena
from gpu_collectives import collectives
from gpu_defaults import joined, receives
from gpu_experts import OURS, PIPERS, ep
from gpu_grouping import grouped
from gpu_groups import REPLICAS, dp, one, pp
from gpu_kernels import kernels
from gpu_memory import host, memory
from gpu_models import SIZES
from gpu_peers import SCHEDULES
from gpu_precision import precision
from gpu_room import STEPS, room, room_of_replicas
from gpu_waits import waits

GROUPS: dict[str, tuple[Callable[[Arena], None], Callable[[int], bool]]] = {
    "one": (one, lambda world: world == 1),
    "joined": (joined, lambda world: world == 1),
    "receives": (receives, lambda world: world > 1),
    "grouped": (grouped, lambda world: world > 1),
    "dp": (dp, lambda world: world > 1),
    "pp": (pp, lambda world: world > 1),
    "precision": (precision, lambda world: world > 1),
    "kernels": (kernels, lambda world: world > 1),
    "collectives": (collectives, lambda world: world > 1),
    "ep": (ep, lambda world: world == 4),
    "waits": (waits, lambda world: world == 4),
    "memory": (memory, lambda world: world == 4),
    "room": (room, lambda world: world == 4),
    "room-dp": (room_of_replicas, lambda world: world > 1),
    "host": (host, lambda world: True),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--group", nargs="+", default=["one"], choices=GROUPS)
    add("--size", choices=SIZES, help="by default medium on a GPU, tiny on a CPU")
    add("--dtype", choices=DTYPES, help="of weights; by default bf16 on a GPU, fp32 on a CPU")
    add("--rows", type=int, help="of a microbatch, if not those of the size")
    add("--microbatches", type=int, help="by default 4; 8 with pipelines")
    add("--repeats", type=int, default=7)
    add("--match", nargs="*", default=[], help="only entries whose names contain one of these")
    add("--skip", nargs="*", default=[], help="no entries, nor contenders of precision, with these")
    add("--models", nargs="+", default=["dense", "moe"], choices=("dense", "moe"), help="of one")
    add("--no-compile", dest="compile", action="store_false", help="of one: no Inductor")
    add(
        "--zero",
        nargs="+",
        type=int,
        default=list(REPLICAS),
        choices=REPLICAS,
        help="of dp, precision, kernels",
    )
    add("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES, help="of pp")
    add("--pp-zero", nargs="*", type=int, default=[1, 3], choices=(0, 1, 2, 3), help="of pp")
    add("--expert-hidden", nargs="*", type=int, help="of ep: widths of experts to choose from")
    add("--ours", default=OURS, choices=PIPERS, help="of ep: runs against all others")
    add("--no-costs", dest="costs", action="store_false", help="of ep: order by estimates")
    add("--budget-gib", type=float, default=4.0, help="of memory and room, for each rank")
    add("--vary", nargs="+", default=list(STEPS), choices=STEPS, help="of room")
    add("--fused", action="store_true", help="AdamW(fused=True) for all")
    add("--patience", type=float, default=180.0, help="seconds without progress before it ends")
    add("--out", help="file of results; by default bench/results/gpu_MACHINE.json")
    add("--verbose", action="store_true", help="whole tracebacks of contenders that fail")
    return parser.parse_args()


def main() -> None:
    arena = Arena(options())
    arena.say(f"{arena.machine()}, {arena.world} rank(s), {arena.size}, {arena.dtype}")
    for name in arena.chosen.group:
        run, suits = GROUPS[name]
        if not suits(arena.world):
            arena.say(f"== {name}: not with {arena.world} rank(s)")
            continue
        arena.say(f"== {name}")
        arena.group, started = name, time.perf_counter()
        run(arena)
        arena.fence()
        arena.say(f"== {name} took {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
