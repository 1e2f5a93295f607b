"""What random operators give for rows: numbers of their own, the same for all numbers of rows."""

from piper.capture.loss.calls import Call
from piper.capture.loss.domain import FIXED, MIXED, Known, Rows
from piper.capture.loss.rules import elementwise, rule
from piper.capture.loss.shapes import filled


@rule(
    "rand_like", "randn_like", "randint_like", "bernoulli", "normal_functional", "uniform",
    "exponential", "rrelu",
)  # fmt: skip
def drawn_like(call: Call) -> Known:
    """A number for each element."""
    return beside_rows(call, elementwise(call))


@rule("rand", "randn", "randint")
def drawn(call: Call) -> Known:
    return beside_rows(call, filled(call))


def beside_rows(call: Call, known: Known) -> Known:
    """Rows count as such if they are the first dimension. A limit that follows them is none."""
    return known if known in (FIXED, Rows(0)) and not call.is_scaled else MIXED
