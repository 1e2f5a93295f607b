"""The schedule in a terminal: aligned in time, wrapped to any width, with all of it explained."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from draws import every
from rich.text import Text
from synthetic import chain

from piper.ir.by_device.schedule_rows import Rows, dag_rows, idle, length
from piper.ir.model import Model
from piper.job.compile.compiler import compile_strategy
from piper.strategies import BUILDERS, one_f_one_b
from piper.strategies.timing import strategy_rows
from piper.view.schedule_grid import BLOCKS, TALL, Window, grid, legend, summary
from piper.view.schedule_svg import svg

WITHOUT_OVERLAP = [name for name in BUILDERS if not name.startswith("dualpipe")]
WIDTHS = (40, 60, 80, 120, 200)


def drawn_rows(name: str, draw: Random) -> Rows:
    pp = draw.choice((2, 4))
    return strategy_rows(BUILDERS[name](pp=pp, microbatches=pp * draw.choice((2, 3, 6))))


@pytest.mark.parametrize("name", WITHOUT_OVERLAP)
@pytest.mark.parametrize(("pp", "parts"), every(4, [(4, 8), (2, 4), (4, 12), (8, 16)]))
def test_a_strategy_is_drawn_as_its_dag_is(name: str, pp: int, parts: int) -> None:
    strategy = BUILDERS[name](pp=pp, microbatches=parts)
    rows = strategy_rows(strategy)
    stages = 1 + max(int(one) for one in re.findall(r"PP=(\d+)", str(strategy)))

    dag = compile_strategy(chain(stages), strategy).dag

    assert grid(rows) == grid(dag_rows(dag))
    assert summary(rows) == summary(dag_rows(dag))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_device_does_one_thing_at_a_time_and_everything_once(name: str) -> None:
    rows = strategy_rows(BUILDERS[name](pp=4, microbatches=8))

    for row in rows.values():
        assert all(before.end <= after.start for before, after in zip(row, row[1:], strict=False))
        labels = [part for cell in row for part in cell.label.split("&")]
        assert len(labels) == len(set(labels))
    work = sum(len(d) * sum(cell.end - cell.start for cell in row) for d, row in rows.items())
    assert work % (8 * 3) == 0
    assert 1 - idle(rows) == pytest.approx(work / (4 * length(rows)))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_schedule_is_wrapped_to_any_width_and_loses_nothing(name: str) -> None:
    rows = drawn_rows(name, Random(name))
    labels = sorted(cell.label for row in rows.values() for cell in row)

    for width in WIDTHS:
        lines = grid(rows, Window(width, steps=(0, length(rows)))).splitlines()
        assert max(map(len, lines)) <= width
        words = [line.split("  ", 1)[1].split() for line in lines if line.startswith("device")]
        assert sorted(w for row in words for w in row if w.strip("-.")) == labels


def test_lines_of_one_block_are_aligned_in_time() -> None:
    rows = strategy_rows(BUILDERS["1f1b"](pp=4, microbatches=12))

    lines = grid(rows).splitlines()

    for devices, row in rows.items():
        line = lines[devices[0]]
        for cell in row:
            at = len("device 0  ") + 4 * cell.start
            assert line[at:].startswith(f"{cell.label} ")


@pytest.mark.parametrize("name", BUILDERS)
def test_colours_change_nothing_but_colours(name: str) -> None:
    rows = drawn_rows(name, Random(name))

    for width in (60, 100):
        painted = grid(rows, Window(width, painted=True))
        assert Text.from_markup(painted).plain.split() == grid(rows, Window(width)).split()


@pytest.mark.parametrize("name", BUILDERS)
def test_every_letter_and_sign_is_explained(name: str) -> None:
    rows = strategy_rows(BUILDERS[name](pp=4, microbatches=8))
    text, meant = grid(rows), legend(rows)

    for sign, word in {
        "BI": "BI input gradients", "BW": "BW weight gradients", "&": "& may overlap",
        "--": "-- still running", " . ": ". idle",
    }.items():  # fmt: skip
        assert (sign in text) == (word in meant), sign
    assert ("stage" in meant) == bool(re.search(r"\d+F\d", text))


def test_a_part_of_the_time_and_of_the_devices_can_be_chosen() -> None:
    rows = strategy_rows(one_f_one_b(pp=4, microbatches=4))

    assert grid(rows, Window(steps=(2, 5), devices=frozenset((1, 3)))).splitlines() == [
        "time steps 2 to 6",
        "device 1  F1 F2 .  .  .",
        "device 3  .  F0 B0 -- F1",
    ]


def test_a_terminal_gets_the_beginning_of_a_very_large_schedule() -> None:
    rows = strategy_rows(one_f_one_b(pp=64, microbatches=64))

    lines = grid(rows, Window(80)).splitlines()

    assert len(lines) == BLOCKS * (TALL + 2) + 1
    assert lines[TALL // 2 + 1] == "... 40 more lines: --devices 12-24 shows some"
    assert lines[-1] == "... --steps 68:17 shows the next part of 381 time steps"
    assert len(grid(rows).splitlines()) == 64


def test_passes_that_overlap_are_one_cell_in_both_colours() -> None:
    rows = strategy_rows(BUILDERS["dualpipev"](pp=2, microbatches=4))

    assert "0F3&3B1 ------ 3F2&0B0 ------ " in grid(rows)
    assert "0F3&[/][#ffffff on #1f7a5a]3B1" in grid(rows, Window(painted=True))
    picture = svg(rows)
    assert "<title>0F3&amp;3B1</title>" in picture
    for label, ink in (("0F3", "#10151c"), ("3B1", "#ffffff")):
        assert f'fill="{ink}">{label}</text>' in picture


def layered_chain(stages: int, layers: int) -> Model:
    model = chain(stages * layers)
    tags = [(("PP", k // layers), ("L", k)) for k in range(stages * layers)]
    named = zip(model.regions, tags, strict=True)
    return replace(model, regions=tuple(replace(one, tags=some) for one, some in named))


@pytest.mark.parametrize("name", WITHOUT_OVERLAP)
def test_the_layers_of_a_stage_are_one_cell(name: str) -> None:
    strategy = BUILDERS[name](pp=2, microbatches=4)
    stages = 1 + max(int(one) for one in re.findall(r"PP=(\d+)", str(strategy)))

    whole = dag_rows(compile_strategy(chain(stages), strategy).dag)
    layered = dag_rows(compile_strategy(layered_chain(stages, 3), strategy).dag)

    assert grid(layered) == grid(whole) and summary(layered) == summary(whole)
    assert svg(layered).count("<title>") == svg(whole).count("<title>")


@pytest.mark.parametrize(
    ("layers", "steps", "words"),
    [((1, 2), 15, " of a layer"), ((2, 4), 15, " of 2 layers"), ((2, 2), 9, "")],
)
def test_a_time_step_is_of_as_many_layers_as_all_stages_can_be_divided_into(
    layers: tuple[int, int], steps: int, words: str
) -> None:
    tags = [("PP", stage) for stage, many in enumerate(layers) for _ in range(many)]
    model = chain(len(tags))
    named = zip(model.regions, tags, strict=True)
    uneven = tuple(replace(one, tags=(tag, ("L", k))) for k, (one, tag) in enumerate(named))
    strategy = BUILDERS["1f1b"](pp=2, microbatches=2)

    rows = dag_rows(compile_strategy(replace(model, regions=uneven), strategy).dag)

    assert length(rows) == steps
    other = "; not comparable with time steps of a stage" if words else ""
    said = f": F{words} takes 1, B takes 2, communication takes none{other}"
    assert summary(rows).endswith(said)
