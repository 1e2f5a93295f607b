"""The evaluation of the paper, piece by piece: runs the benchmarks, and writes docs/paper.md.

    python bench/paper.py                        # all pieces
    python bench/paper.py schedules compile      # these
    python bench/paper.py --page                 # only the page, from the results that are kept

With a GPU, four ranks share it. Without one, everything is tiny and runs on the CPU. Raw results
are kept for each machine in bench/results/paper/.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import paper_page
from common import RESULTS

HERE = Path(__file__).parent
KEPT = RESULTS / "paper"
SITE = HERE.parent / ".peers"  # the packages of the real peers
RANKS = 4


@dataclass(frozen=True)
class Machine:
    """Where the pieces run."""

    name: str
    gpu: bool

    def launched(self, script: str, *given: str, ranks: int = RANKS) -> list[str]:
        """A command that runs a script on several ranks."""
        share = ["--share-gpu"] if self.gpu and ranks > 1 else []
        run = [sys.executable, "-m", "piper", "run", "-n", str(ranks), *share]
        return [*run, str(HERE / script), *self.short, *given]

    @property
    def short(self) -> list[str]:
        return [] if self.gpu else ["--repeats", "3"]


Commands = list[list[str]]


def schedules(on: Machine, out: str) -> Commands:
    """On a GPU, with experts of a width for which messages take about as long as compute."""
    few = ["--match", "1f1b", "1F1B", "zbv", "--skip", "in turn", "--microbatches", "4"]
    balanced = ["--rows", "4", "--expert-hidden", "4096", "6144", "8192"]
    return [on.launched("gpu.py", "--group", "ep", "--out", out, *(balanced if on.gpu else few))]


def zero(on: Machine, out: str) -> Commands:
    ranks = RANKS if on.gpu else 2
    return [on.launched("gpu.py", "--group", "dp", "--out", out, ranks=ranks)]


def peers(on: Machine, out: str) -> Commands:
    """A process of its own for each group, because the peers' state is global."""
    sizes = ("medium", "large") if on.gpu else ("tiny",)
    given = ["--out", out, *([] if on.gpu else ["--match", "1f1b", "zero=1"])]
    return [
        on.launched("real_peers.py", "--group", group, "--size", size, *given)
        for size in sizes
        for group in ("ds-zero", "ds-pipe", "megatron", "titan")
    ]


def batch(on: Machine, out: str) -> Commands:
    return [on.launched("gpu.py", "--group", "memory", "--out", out)]


def streams(on: Machine, out: str) -> Commands:
    return [on.launched("streams.py", "--out", out)]


def scaling(on: Machine, out: str) -> Commands:
    measured = [on.launched("weak_scaling.py", "--out", out, ranks=ranks) for ranks in (1, 2, 4)]
    counts = ["16", "64", "256", "1024", "4096"] if on.gpu else ["16", "256", "4096"]
    simulated = [str(HERE / "weak_scaling.py"), "--out", out, "--simulate", *counts]
    return [*measured, [sys.executable, *simulated]]


def overhead(on: Machine, out: str) -> Commands:
    ranks = RANKS if on.gpu else 2
    return [on.launched("gpu.py", "--group", "host", "--out", out, ranks=ranks)]


def compile_time(on: Machine, out: str) -> Commands:
    nodes = [] if on.gpu else ["--nodes", "1000", "10000"]
    return [[sys.executable, str(HERE / "compile_time.py"), "--out", out, *nodes]]


PIECES: dict[str, Callable[[Machine, str], Commands]] = {
    "schedules": schedules,
    "zero": zero,
    "peers": peers,
    "batch": batch,
    "streams": streams,
    "scaling": scaling,
    "overhead": overhead,
    "compile": compile_time,
}


def machine() -> Machine:
    import torch

    gpu = torch.cuda.is_available() and os.environ.get("PIPER_DEVICE") != "cpu"
    name = torch.cuda.get_device_name() if gpu else f"cpu {os.cpu_count()} cores"
    return Machine("_".join(name.lower().split()), gpu)


def run(piece: str, on: Machine) -> bool:
    """Run a piece. If a command fails, the results that it had before stay."""
    out = KEPT / on.name / piece
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{piece}.part")
    part.with_suffix(".part.json").unlink(missing_ok=True)
    started, environment = time.perf_counter(), dict(os.environ)
    if not on.gpu:
        environment |= {"PIPER_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    for command in PIECES[piece](on, str(part)):
        print("$", *command[1:], flush=True)
        if subprocess.run(command, env=environment, check=False).returncode:
            print(f"{piece} FAILED", flush=True)
            return False
    part.with_suffix(".part.json").replace(f"{out}.json")
    print(f"== {piece} took {time.perf_counter() - started:.0f} s", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=", ".join(PIECES))
    parser.add_argument("--page", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    unknown = set(chosen.pieces) - set(PIECES)
    if unknown:
        parser.error(f"there is no piece {', '.join(unknown)}; there are {', '.join(PIECES)}")
    done = True
    if not chosen.page:
        on = machine()
        known = [piece for piece in PIECES if piece != "peers" or SITE.exists()]
        missing = "" if SITE.exists() else f"; no {SITE.name}, so the piece `peers` is left out"
        print(f"on {on.name}{'' if chosen.pieces else missing}", flush=True)
        ran = [run(piece, on) for piece in chosen.pieces or known]
        done = all(ran)
    paper_page.write(KEPT)
    print(paper_page.DOCS / "paper.md")
    sys.exit(not done)


if __name__ == "__main__":
    main()
