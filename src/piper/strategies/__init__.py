"""Well-known pipeline schedules: functions that return directives, and their tables."""

import sys
from typing import TYPE_CHECKING

from piper.directives.strategy import Strategy
from piper.strategies.assembly import to_directives
from piper.strategies.builders import (
    BUILDERS,
    dualpipe,
    dualpipev,
    from_csv,
    from_orders,
    from_table,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zb,
    one_f_one_b,
    zb_h1,
    zbv,
)
from piper.strategies.check import check
from piper.strategies.export import to_csv, to_table
from piper.strategies.options import PipelineOptions
from piper.strategies.other_names import missing as _missing
from piper.strategies.peak import peaks
from piper.strategies.pytorch_csv import parse_csv, print_csv
from piper.strategies.schedules.table import Action, Table, draw

__all__ = [
    "BUILDERS", "Action", "PipelineOptions", "Strategy", "Table", "check", "draw", "dualpipe",
    "dualpipev", "from_csv", "from_orders", "from_table", "gpipe", "interleaved_one_f_one_b",
    "interleaved_zb", "one_f_one_b", "parse_csv", "peaks", "print_csv", "to_csv", "to_directives",
    "to_table", "zb_h1", "zbv",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> object:
        raise _missing(sys.modules[__name__], name)
