"""The same tables as PyTorch's, and texts that each reads of the other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from draws import one_of
from strategies.tables import equal_rounds, every_schedule, sizes, table

from piper.strategies import schedules
from piper.strategies.pytorch_csv import parse_csv, print_csv
from piper.strategies.schedules.table import Table

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_schedule(name: str, pp: int, microbatches: int, per_rank: int = 1) -> Any:
    """PyTorch's schedule object; it asks no more of a stage than this."""
    stage = SimpleNamespace(num_stages=pp * per_rank, group_size=pp, group_rank=0, submod=None)
    stages = stage if per_rank == 1 else [stage] * per_rank
    return torch_schedules.get_schedule_class(name)(stages, microbatches)


def rows_text(rows: dict[int, list[Any]]) -> str:
    cells = (["" if action is None else str(action) for action in row] for row in rows.values())
    return "\n".join(map(",".join, cells))


def torch_table(name: str, pp: int, microbatches: int, per_rank: int = 1) -> Table:
    """Without PyTorch's own communication pass, which takes most of the time."""
    runtime = torch_schedules._PipelineScheduleRuntime
    with mock.patch.object(runtime, "_prepare_schedule_with_comms", lambda *_: None):
        schedule = torch_schedule(name, pp, microbatches, per_rank)
    return parse_csv(rows_text(schedule.pipeline_order))


@pytest.mark.parametrize(("pp", "microbatches"), sizes())
def test_tables_agree_with_pytorch(pp: int, microbatches: int) -> None:
    assert schedules.gpipe(pp, microbatches) == torch_table("GPipe", pp, microbatches)
    assert schedules.zbv(pp, microbatches) == torch_table("ZBVZeroBubble", pp, microbatches, 2)
    if microbatches >= 2 * pp:
        dualpipev = torch_table("DualPipeV", pp, microbatches, 2)
        assert schedules.dualpipev(pp, microbatches) == dualpipev
        assert schedules.dualpipe(2 * pp, microbatches) == dualpipev


@pytest.mark.parametrize(("pp", "microbatches"), [size for size in sizes() if size[1] >= size[0]])
def test_1f1b_agrees_with_pytorch_but_for_its_last_rank(pp: int, microbatches: int) -> None:
    """PyTorch's picture, not its execution, numbers the forwards of the last rank from 1.

    It also wants a microbatch for every stage; Piper does not.
    """
    ours, theirs = schedules.one_f_one_b(pp, microbatches), torch_table("1F1B", pp, microbatches)
    last = [f"{pp - 1}F{m} {pp - 1}B{m}" for m in range(microbatches)]

    assert ours.rows[:-1] == theirs.rows[:-1]
    assert ours.rows[-1:] == table(" ".join(last)).rows


@one_of(3)
@pytest.mark.parametrize(("pp", "microbatches"), [size for size in sizes() if equal_rounds(*size)])
@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_interleaved_tables_agree_with_pytorch(pp: int, microbatches: int, virtual: int) -> None:
    pairs: list[tuple[Callable[[int, int, int], Table], str]] = [
        (schedules.interleaved_one_f_one_b, "Interleaved1F1B"),
        (schedules.interleaved_zb, "InterleavedZeroBubble"),
    ]
    for build, name in pairs:
        assert build(pp, microbatches, virtual) == torch_table(name, pp, microbatches, virtual)


@pytest.mark.parametrize(("pp", "microbatches"), [s for s in sizes() if not equal_rounds(*s)])
def test_sizes_that_cannot_interleave_are_those_that_pytorch_refuses(
    pp: int, microbatches: int
) -> None:
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        torch_schedule("Interleaved1F1B", pp, microbatches, 2)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_pytorchs_text_with_communication_reads_as_the_table_without(name: str) -> None:
    theirs = torch_schedule(name, 3, 6, 2)

    assert parse_csv(rows_text(theirs.pipeline_order_with_comms)) == torch_table(name, 3, 6, 2)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (3, 6), (4, 8)])
def test_pytorch_reads_and_accepts_what_piper_writes(pp: int, microbatches: int) -> None:
    for ours in every_schedule(pp, microbatches):
        rows = print_csv(ours).splitlines()
        read = {
            rank: [torch_schedules._Action.from_str(cell) for cell in row.split(",")]
            for rank, row in enumerate(rows)
        }

        assert rows_text(read) == "\n".join(rows)
        torch_schedules._validate_schedule(read, len(ours.rows), ours.stages, microbatches)
