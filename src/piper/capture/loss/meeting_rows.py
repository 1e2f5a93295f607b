"""Where rows of a batch meet inside a model, so that a microbatch computes with its own rows only.

A loop that accumulates gradients does the same. Plain training on the whole batch does not.
"""

import math
from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor, fx

from piper.capture.fx_nodes import closure, in_order, line, value
from piper.capture.loss.calls import Call, base_name
from piper.capture.loss.domain import FIXED, MIXED, Reduced, Root, Rows
from piper.capture.loss.proof import batch_rows, followed
from piper.capture.loss.rules import pairs_rows, works_along_rows
from piper.capture.trace.forward import Traced


def meeting_rows(traced: Traced) -> str:
    """The first line that is proved to let rows meet, with its operator. Empty: none is.

    Batch norm is not one of them: everybody knows it. Sums over rows that end in the loss are not,
    either: side losses of mixtures are such sums.
    """
    rows = traced.inputs.rows
    if not rows:
        return ""
    given = {
        node: FIXED if k in traced.inputs.whole else batch_rows(node, rows)
        for k, node in enumerate(traced.batch)
    }
    graph = traced.root.graph
    guessed: set[fx.Node] = set()
    known = followed(graph, given, frozenset(traced.batch), rows, model=True, guessed=guessed)
    used = in_order(graph, closure([traced.results[0]], stop=()))
    calls = [Call(node, None, known, rows, frozenset()) for node in used]
    places = _places(calls)
    causes = (_cause(call) or _beyond(call, places) for call in calls)
    proved = (one for one in filter(None, causes) if guessed.isdisjoint(closure([one], stop=())))
    found = next(proved, None)
    return f"{line(found)} (aten.{base_name(found)})" if found is not None else ""


def _cause(call: Call) -> fx.Node | None:
    """The operation over several rows whose result is used for rows here."""
    if pairs_rows(call):
        return call.node
    if not _is_floating(call.node):
        return None
    if (found := _norm_in_use(call)) is not None or not _first(call.node).dim():
        return found
    if _is_replaced(call):
        return call.node
    return call.node if works_along_rows(call) else _reduced_beside_rows(call)


def _norm_in_use(call: Call) -> fx.Node | None:
    """A norm over rows, of each column or beside rows, whose power is not what is used of it."""
    if call.known[call.node] != MIXED:
        return None
    norms = (one for one in call.node.all_input_nodes if isinstance(call.known[one], Root))
    return next((one for one in norms if value(one).dim() or _first(call.node).dim()), None)


def _is_replaced(call: Call) -> bool:
    """Whether elements of rows become a value of all rows, or all do where it decides: `x.median()`
    for outliers, `x * 2` if any is NaN. On most data nothing shows it.

    What decides by other values, such as whether there is padding, is left to trials: the results
    may well be equal.
    """
    if call.name not in ("where", "masked_fill"):
        return False
    inputs = call.node.all_input_nodes
    deciding = [call.given["condition" if call.name == "where" else "mask"]]
    of_all = [one for one in inputs if call.known[one] == MIXED and _is_single(value(one))]
    seen = all(_is_common(one) for one in closure(of_all, stop=())) and of_all == deciding
    return bool(of_all) and not seen and any(isinstance(call.known[one], Rows) for one in inputs)


def _is_common(node: fx.Node) -> bool:
    """Not a question after NaN or infinity, which random data do not have."""
    asks = base_name(node) in ("isnan", "isinf", "isfinite", "isposinf", "isneginf")
    itself = base_name(node) in ("eq", "ne") and node.args[0] is node.args[1]
    return not asks and not itself and math.inf not in node.args and -math.inf not in node.args


def _is_single(found: Any) -> bool:
    return isinstance(found, Tensor) and not found.dim()


def _is_floating(node: fx.Node) -> bool:
    """Numbers of tokens and the order of tokens by experts have no gradient."""
    found = _first(node)
    return isinstance(found, Tensor) and found.is_floating_point()


def _first(node: fx.Node) -> Any:
    """Some operators also return indices: `topk`, `sort`."""
    found = value(node)
    return found[0] if isinstance(found, tuple | list) and found else found


def _places(calls: Sequence[Call]) -> set[fx.Node]:
    """The place of each row among those of its kind, `(one_hot.cumsum(0) * one_hot).sum(1)`, and
    whatever integers are made of it."""
    found: set[fx.Node] = set()
    for call in calls:
        counts = call.name == "cumsum" and works_along_rows(call)
        if not _is_floating(call.node) and (
            counts or not found.isdisjoint(call.node.all_input_nodes)
        ):
            found.add(call.node)
    return found


def _beyond(call: Call, places: Set[fx.Node]) -> fx.Node | None:
    """Rows whose place is beyond a limit, such as what an expert takes, are treated otherwise."""
    if call.name not in ("lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"):
        return None
    given = call.node.all_input_nodes
    limits = [one for one in given if one not in places]
    single = all(call.known[one] == FIXED and not value(one).dim() for one in limits)
    return call.node if single and any(one in places for one in given) else None


def _reduced_beside_rows(call: Call) -> fx.Node | None:
    """A sum or mean over rows that is combined with rows again, as in `x - x.mean(0)`."""
    inputs = call.node.all_input_nodes
    if call.known[call.node] != MIXED or not any(isinstance(call.known[n], Rows) for n in inputs):
        return None
    reduced = (node for node in inputs if isinstance(call.known[node], Reduced))
    return next(filter(_is_floating, reduced), None)
