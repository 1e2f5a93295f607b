"""docs/paper.md is what bench/paper.py writes from the results that are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import paper_page  # noqa: E402
from paper_tables import TABLES  # noqa: E402

RATIO = {"median": 0.5, "low": 0.4, "high": 0.6, "ours_ms": 10.0, "theirs_ms": 20.0}
SIZE = {"microbatches": 8, "rows": 2, "length": 16}
EXPERTS = {"size": SIZE, "ours": "piper dualpipev", "microbatches": None, "world": 4}


def grouped(group: str, entries: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    return {group: {"entries": entries, "settings": settings}}


RESULTS: dict[str, dict[str, Any]] = {
    "schedules": grouped(
        "ep",
        {"torch 1F1B": {"ratios": {"a / b": RATIO}}, "communication / compute": {"ratio": 1.0}},
        EXPERTS,
    ),
    "zero": grouped("dp", {"zero=0": {"ratios": {"piper / ddp": RATIO}}, "compute alone": {}}, {}),
    "peers": {
        "megatron, large": {
            "entries": {
                "pp=4": {
                    "ratios": {"piper / megatron": RATIO},
                    "peak_gib": {"piper": [1.0, 1.5], "megatron": [2.0, 1.0]},
                    "unequal": ["megatron"],
                },
                "plain": {"losses": {}},
            }
        }
    },
    "batch": grouped(
        "memory",
        {
            "piper zero=2": {"rows": 3, "seen": {"3": {"peak": 2**21, "computed": 2**20}}},
            "torch x fsdp2 keep": {"failed": "no memory"},
        },
        {},
    ),
    "streams": {"ways": {"own": {"ms": 5.0, "slowdown": [{"messages": 1, "slowdown": 1.5}]}}},
    "scaling": {
        "measured": [{"devices": 2, "tokens": 100, "ms": 50.0, "alone_ms": 40.0}],
        "simulated": [
            {"devices": 16, "tokens": 100, "ms": 50.0},
            {"devices": 32, "tokens": 200, "ms": 100.0},
        ],
    },
    "overhead": grouped(
        "host",
        {
            "loop alone": {"us_per_instruction": 2.5, "instructions": 10},
            "1f1b": {"seconds": {"piper": [0.5]}, "instructions": 100, "ratios": {"x": RATIO}},
        },
        {},
    ),
    "compile": {"1f1b 1000": {"nodes": 1000, "seconds": 0.5}},
}
ROWS = {  # a row of each table, computed by hand
    "schedules": ("torch 1F1B", "20.0 ms", "25,600", "0.500x [0.400, 0.600]"),
    "zero": ("zero=0", "piper", "10.0 ms", "ddp", "20.0 ms", "0.500x [0.400, 0.600]"),
    "peers": (
        "megatron, large",
        "pp=4",
        "megatron, losses differ",
        "10.0 ms, 1.50 GiB",
        "20.0 ms, 2.00 GiB",
        "0.500x [0.400, 0.600]",
    ),  # fmt: skip
    "batch": ("piper zero=2", "3", "2.0 MiB", "1.0 MiB"),
    "streams": ("own", "5.0 ms", "1.50x beside 1"),
    "scaling": ("simulated", "32", "100.0 ms", "62", "50.0%"),
    "overhead": ("1f1b", "100", "5000.00 us", "0.500x [0.400, 0.600]"),
    "compile": ("1f1b", "1,000", "0.50 s", "500 us"),
}


@pytest.mark.parametrize("piece", TABLES)
def test_a_table_has_the_figures_of_its_results(piece: str) -> None:
    table = TABLES[piece](RESULTS[piece])

    assert ROWS[piece] in table.rows
    assert all(len(row) == len(table.head) for row in table.rows)


def test_the_page_shows_every_machine_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "kept" / "gpu").mkdir(parents=True)
    (tmp_path / "images").mkdir()
    on = {"gpu": "H200 & more", "torch": "2.13", "when": "2026-11-17"}
    kept = tmp_path / "kept" / "gpu" / "zero.json"
    kept.write_text(json.dumps({"on": on, "results": RESULTS["zero"]}))

    paper_page.write(tmp_path / "kept", tmp_path)

    page = (tmp_path / "paper.md").read_text()
    assert "H200 & more, torch 2.13, 2026-11-17:" in page
    assert f"| {' | '.join(ROWS['zero'])} |" in page
    assert page.count("Not measured yet") == len(TABLES) - 1
    assert "zero=0: piper / ddp" in (tmp_path / "images" / "paper_zero_gpu.svg").read_text()


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()

    paper_page.write(ROOT / "bench" / "results" / "paper", tmp_path)

    assert (tmp_path / "paper.md").read_text() == (ROOT / "docs" / "paper.md").read_text()
