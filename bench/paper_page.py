"""docs/paper.md and its plots, from the raw results of bench/paper.py."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paper_tables import TABLES, Table

DOCS = Path(__file__).parent.parent / "docs"
ABOUT = {  # piece -> title, and what it shows
    "schedules": (
        "Throughput of pipelines with experts",
        "PP=2 x EP=2: Piper's schedules and those of torch's pipelining, on the same modules. "
        "Contenders take steps in turn, in the same processes. Their losses were found equal "
        "first.",
    ),
    "zero": (
        "ZeRO levels",
        "All ranks are replicas. The peers are torch's DDP and FSDP2. Piper is faster where the "
        "ratio is below 1.",
    ),
    "peers": (
        "DeepSpeed, Megatron-Core and TorchTitan",
        "All train the same modules, in turn, in the same processes, each with its own defaults. "
        "Their losses were compared first: where they differ, the row says so. Memory is the most "
        "that a contender adds to a rank.",
    ),
    "batch": (
        "Largest batch",
        "PP=2 x DP=2 with 1F1B: how many rows of a microbatch fit in a given memory.",
    ),
    "streams": (
        "Streams and buckets",
        "PP=2 x DP=2, ZeRO-2 that reduces after each microbatch. Messages have their own streams, "
        "or share one. The last column compares the same passes with and without messages in "
        "flight.",
    ),
    "scaling": (
        "Weak scaling",
        "Measured ranks share one machine, so the last column compares them with as many processes "
        "of plain PyTorch that send nothing. **Simulated rows are predictions**, not measurements: "
        "a DeepSeek-V3-like job on H800s, PP=16, up to EP=64, against its smallest size.",
    ),
    "overhead": (
        "Runtime overhead",
        "A step whose kernels are so small that the host is the limit, and the loop over "
        "instructions alone.",
    ),
    "compile": (
        "Compile time",
        "Everything after capture (directives, passes and plans), with all checks.",
    ),
}
INTRODUCTION = (
    "`make paper` runs all pieces, and `make paper PIECE=zero` runs one. The pieces are {pieces}. "
    "With a GPU, four ranks share it. On a CPU everything is tiny, which shows that a piece runs, "
    "not how fast Piper is. `bench/results/paper/` holds the raw results of each machine, with its "
    "load. `bench/paper.py` writes this page from them. [Benchmarks](benchmarks.md) has larger "
    "runs, with explanations.",
    "The piece `peers` needs the packages of DeepSpeed, Megatron-Core and TorchTitan. "
    "[Benchmarks](benchmarks.md#deepspeed-megatron-core-and-torchtitan) says where to put them.",
)


def introduction(pieces: str) -> Iterator[str]:
    for paragraph in INTRODUCTION:
        yield f"{wrapped(paragraph.format(pieces=pieces))}\n"


def write(kept: Path, docs: Path = DOCS) -> None:
    """The page and its plots, for all machines that have results."""
    found: dict[str, dict[str, Any]] = {piece: {} for piece in ABOUT}
    for path in sorted(kept.glob("*/*.json")):
        if path.stem in found:
            found[path.stem][path.parent.name] = json.loads(path.read_text())
    names = ", ".join(f"`{piece}`" for piece in ABOUT)
    parts = ["# The paper's evaluation\n", *introduction(names)]
    for piece, machines in found.items():
        parts += section(piece, machines, docs / "images")
    (docs / "paper.md").write_text("\n".join(parts))


def section(piece: str, machines: dict[str, Any], images: Path) -> Iterator[str]:
    title, text = ABOUT[piece]
    yield f"## {title}\n\n{wrapped(text)}\n"
    if not machines:
        yield f"Not measured yet: `make paper PIECE={piece}`.\n"
    for name, kept in machines.items():
        table = TABLES[piece](kept["results"])
        image = images / f"paper_{piece}_{name}.svg"
        image.write_text(bars(table))
        on = kept["on"]
        device = on["gpu"] or f"{on['cores']} CPU cores ({on['machine']}), load {on['load']}"
        note = f"; {on['note']}" if "note" in on else ""
        where = wrapped(f"{device}, torch {on['torch']}, {on['when']}{note}:")
        yield f"{where}\n\n{markdown(table)}\n"
        yield f"![{title}, {table.unit}](images/{image.name})\n"


def wrapped(text: str, width: int = 100) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def markdown(table: Table) -> str:
    rows = [table.head, tuple("---" for _ in table.head), *table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def bars(table: Table, wide: int = 360, high: int = 22) -> str:
    """Horizontal bars as SVG, which needs no library."""
    text = 20 + 7 * max((len(name) for name, _ in table.bars), default=0)  # at most 7 px a letter
    most = max((value for _, value in table.bars), default=1.0) or 1.0
    lines = []
    for k, (name, value) in enumerate(table.bars):
        y, length = k * high, wide * value / most
        label = html.escape(name)
        lines += [
            f'<text x="{text - 8}" y="{y + 15}" text-anchor="end">{label}</text>',
            f'<rect x="{text}" y="{y + 4}" width="{length:.1f}" height="{high - 8}"/>',
            f'<text x="{text + length + 6:.1f}" y="{y + 15}">{value:,.4g}</text>',
        ]
    size = f'width="{text + wide + 90}" height="{high * (len(table.bars) + 1)}"'
    end = f'<text x="{text}" y="{high * len(table.bars) + 15}">{html.escape(table.unit)}</text>'
    style = "text{font:12px sans-serif;fill:#667}rect{fill:#3b7dd8}"
    body = "\n".join([*lines, end])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>\n{body}\n</svg>\n'
    )
