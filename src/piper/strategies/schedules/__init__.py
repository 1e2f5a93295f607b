"""Well-known schedules: functions from sizes to a table, each drawn in its docstring."""

from piper.strategies.schedules.looped import (
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zb,
    one_f_one_b,
    zb_h1,
)
from piper.strategies.schedules.v_shaped import dualpipe, dualpipev, zbv

__all__ = [
    "dualpipe", "dualpipev", "gpipe", "interleaved_one_f_one_b", "interleaved_zb", "one_f_one_b",
    "zb_h1", "zbv",
]  # fmt: skip
