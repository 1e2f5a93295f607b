"""Compile time of everything after capture, for 1k, 10k and 100k nodes.

    python bench/compile_time.py

Goal: linear, 100k nodes under 10 s.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from common import save  # noqa: E402
from synthetic import chain  # noqa: E402

from piper.job.compile.compiler import compile_strategy  # noqa: E402
from piper.strategies import BUILDERS  # noqa: E402

STAGES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--out", default="compile_time")
    chosen, results = parser.parse_args(), {}
    for name in ("1f1b", "zb-h1"):
        previous = None
        for nodes in chosen.nodes:
            per_part = (4 if name == "1f1b" else 5) * STAGES - 2
            strategy = BUILDERS[name](pp=STAGES, microbatches=max(STAGES, nodes // per_part))
            started = time.perf_counter()
            compiled = compile_strategy(chain(STAGES), strategy.directives)
            seconds = time.perf_counter() - started
            count = len(compiled.dag.nodes)
            growth = f"{seconds / previous[0] / (count / previous[1]):.2f}" if previous else "-"
            print(
                f"{name:8} {count:7} nodes  {seconds:7.2f} s  {1e6 * seconds / count:6.1f} us/node "
                f" growth against linear: {growth}",
                flush=True,
            )
            previous = (seconds, count)
            results[f"{name} {nodes}"] = {"nodes": count, "seconds": seconds}
    save(chosen.out, results)


if __name__ == "__main__":
    main()
