"""Well-known pipeline schedules: functions that return directives, and their tables."""

from collections.abc import Callable

from piper.directives import Strategy
from piper.strategies.check import check
from piper.strategies.peak import peaks
from piper.strategies.pipeline import (
    dualpipe,
    dualpipev,
    from_csv,
    from_table,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zb,
    one_f_one_b,
    to_directives,
    zb_h1,
    zbv,
)
from piper.strategies.export import to_csv, to_table
from piper.strategies.table import Action, Table, draw
from piper.strategies.text import parse_csv, print_csv

BUILDERS: dict[str, Callable[..., Strategy]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_one_f_one_b,
    "zb-h1": zb_h1,
    "interleaved-zb": interleaved_zb,
    "zbv": zbv,
    "dualpipev": dualpipev,
    "dualpipe": dualpipe,
}

__all__ = [
    "BUILDERS",
    "Action",
    "Table",
    "check",
    "draw",
    "dualpipe",
    "dualpipev",
    "from_csv",
    "from_table",
    "gpipe",
    "interleaved_one_f_one_b",
    "interleaved_zb",
    "one_f_one_b",
    "parse_csv",
    "peaks",
    "print_csv",
    "to_csv",
    "to_directives",
    "to_table",
    "zb_h1",
    "zbv",
]
