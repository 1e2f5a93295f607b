"""What norms do to rows. Their powers are sums: `(u.norm() ** 2 + v.norm() ** 2) / len(u)`."""

from piper.capture.loss.calls import Call, shape
from piper.capture.loss.domain import MIXED, SUM, Known, Root, Rows
from piper.capture.loss.rules import elementwise, rule, within_rows

EUCLIDEAN = (None, "fro")  # what torch takes if no order is given, and its other name


@rule("linalg_vector_norm", "norm", "linalg_norm", "linalg_matrix_norm", "frobenius_norm", "dist")
def norm(call: Call) -> Known:
    known = elementwise(call) if call.name == "dist" else call.of("self")
    dims, order = call.dims(), order_of(call)
    if not isinstance(known, Rows) or (dims is not None and known.dim not in dims):
        return within_rows(call)
    if known.over is not None or order is None or not 1 <= order < float("inf"):
        return MIXED
    return SUM if order == 1 else Root(order)


def order_of(call: Call) -> float | None:
    """None: it is no sum of powers, as the largest singular value of a matrix is none."""
    given = call.given.get("ord", call.given.get("p"))
    if given in EUCLIDEAN:
        return 2
    dims = call.dims() or range(len(shape(call.given["self"])))
    of_matrix = call.name == "linalg_matrix_norm" or (call.name == "linalg_norm" and len(dims) > 1)
    return float(given) if isinstance(given, int | float) and not of_matrix else None


@rule("pow", "square", "float_power")
def power(call: Call) -> Known:
    known = call.of("self")
    exponent = 2 if call.name == "square" else call.given.get("exponent")
    return SUM if isinstance(known, Root) and known.power == exponent else elementwise(call)
