"""What is shown of thousands of devices: a line, a row or a name for each role, not for each."""

from __future__ import annotations

from synthetic import chain

from piper.ir.by_device.schedule_rows import dag_rows
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.strategies import one_f_one_b
from piper.view.reports.footprint import footprint
from piper.view.schedule_grid import grid, summary
from piper.view.schedule_svg import svg


def compiled(dp: int, by_role: bool = True) -> Compiled:
    strategy = one_f_one_b(pp=2, microbatches=2, dp=dp)
    return compile_strategy(chain(2), strategy.directives, by_role=by_role)


def test_the_schedule_has_a_line_for_each_role() -> None:
    large, small = compiled(2048).dag, compiled(2).dag

    assert grid(dag_rows(large)).splitlines() == [
        "devices 0, 2, 4 and 2045 more  F0 F1 .  .  B0 -- .  B1 --",
        "devices 1, 3, 5 and 2045 more  .  F0 B0 -- F1 B1 -- .  .",
    ]
    assert summary(dag_rows(large)) == summary(dag_rows(small))


def test_the_picture_has_a_row_for_each_role() -> None:
    large, small = (svg(dag_rows(compiled(n).dag)) for n in (2048, 2))

    assert large.count("<text x=") < small.count("<text x=")
    assert ">0 (+2047)<" in large
    assert ">device 0<" in small


def test_memory_is_told_of_all_devices_of_a_role() -> None:
    one = compiled(2048)
    first, second = footprint(one.dag, one.plans, one.roles).splitlines()

    assert first.startswith("devices 0, 2, 4 and 2045 more  peak ")
    assert second.startswith("devices 1, 3, 5 and 2045 more  peak ")
    few, full = compiled(2), compiled(2, by_role=False)
    told = footprint(few.dag, few.plans, few.roles)
    assert told == footprint(full.dag, full.plans, full.roles)


def test_plans_do_not_list_thousands_of_devices() -> None:
    text = str(compiled(2048).plan(4095))

    assert "among 1..4095:2 on dp" in text
    assert max(map(len, text.splitlines())) < 120
