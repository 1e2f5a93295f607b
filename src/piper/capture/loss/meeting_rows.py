"""Where rows of a batch meet inside a model, so that a microbatch computes with its own rows only.

A loop that accumulates gradients does the same. Plain training on the whole batch does not.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import count
from typing import Any

from torch import Tensor, fx

from piper.capture.fx_nodes import closure, in_order, line, value
from piper.capture.loss.calls import Call, base_name
from piper.capture.loss.domain import FIXED, MIXED, Known, Reduced, Root, Rows
from piper.capture.loss.proof import batch_rows, followed
from piper.capture.loss.rules import pairs_rows, works_along_rows
from piper.capture.torch_private import fake_errors_unlogged
from piper.capture.trace.arguments.inputs import Inputs
from piper.capture.trace.forward import Traced

SHARES = ("softmax", "_softmax", "softmin", "log_softmax", "_log_softmax")


def meeting_rows(traced: Traced, again: Callable[[Inputs], fx.GraphModule]) -> str:
    """The first line that is proved to let rows meet, with its operator. Empty: none is.

    Batch norm is not one of them: everybody knows it. Sums over rows that end in the loss are not,
    either: side losses of mixtures are such sums.

    `again` traces the model for other rows: features may be as many as the rows by chance.
    """
    inputs = traced.inputs
    if not inputs.rows:
        return ""
    found = _first_cause(traced.root.graph, traced.batch, inputs)
    return "" if found is None or _by_chance(traced, again) else f"{line(found)} ({_name(found)})"


def _name(node: fx.Node) -> str:
    name = base_name(node)
    return f"aten.{name}" if name else f"torch.{node.target}"


def _by_chance(traced: Traced, again: Callable[[Inputs], fx.GraphModule]) -> bool:
    """Whether nothing meets for a number of rows of which no size is a multiple."""
    rows, places = traced.inputs.rows or 1, traced.root.graph.find_nodes(op="placeholder")
    sizes = {size for node in places for size in value(node).shape if type(size) is int}
    other = next(n for n in count(rows + 1) if all(size % n or not size for size in sizes))
    inputs = traced.inputs.with_rows(other)
    try:
        with fake_errors_unlogged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they have been seen when the model was traced
            graph = again(inputs).graph
    except Exception:  # it is made for these rows
        return False
    batch = graph.find_nodes(op="placeholder")[-len(inputs.tensors) :]
    return _first_cause(graph, batch, inputs) is None


def _first_cause(graph: fx.Graph, batch: Sequence[fx.Node], inputs: Inputs) -> fx.Node | None:
    rows = inputs.rows or 0
    given = {
        node: FIXED if k in inputs.whole else batch_rows(node, rows) for k, node in enumerate(batch)
    }
    guessed: set[fx.Node] = set()
    known = followed(graph, given, frozenset(batch), rows, model=True, guessed=guessed)
    used = in_order(graph, closure([graph.output_node().args[0][0]], stop=()))
    calls = [Call(node, None, known, rows, frozenset()) for node in used]
    places = _places(calls)
    causes = (_cause(call) or _beyond(call, places) for call in calls)
    proved = (one for one in filter(None, causes) if guessed.isdisjoint(closure([one], stop=())))
    return next(proved, None)


def _cause(call: Call) -> fx.Node | None:
    """The operation over several rows whose result is used for rows here."""
    if pairs_rows(call) or _is_decided(call) or _is_scanned(call):
        return call.node
    if not _is_floating(call.node):
        return None
    if (found := _norm_in_use(call)) is not None or not _first(call.node).dim():
        return found
    if _is_replaced(call):
        return call.node
    return call.node if works_along_rows(call) else _reduced_beside_rows(call)


def _is_decided(call: Call) -> bool:
    """Whether all rows together decide what happens, or how often: `torch.cond`, `while_loop`."""
    if (name := str(call.node.target)) == "cond":
        return call.known.get(call.node.args[0], FIXED) != FIXED
    if name != "while_loop":
        return False
    condition, _, *carried = call.node.args
    given = [one for part in carried for one in part]
    graph = _inside(condition).graph
    pairs = zip(graph.find_nodes(op="placeholder"), given, strict=False)
    asked = closure([graph.output_node()], stop=())
    return any(node in asked and call.known.get(one, FIXED) != FIXED for node, one in pairs)


def _is_scanned(call: Call) -> bool:
    """Whether a `scan` goes from row to row."""
    if (name := str(call.node.target)) not in ("scan", "associative_scan"):
        return False
    scanned = call.node.args[2 if name == "scan" else 1]
    return any(call.known.get(one) == Rows(0) for one in scanned)


def _inside(function: fx.Node) -> fx.GraphModule:
    """What a higher-order operator calls."""
    module = function.graph.owning_module
    return getattr(module, str(function.target))


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


def shares_rows(loss: fx.Node, known: Mapping[fx.Node, Known]) -> bool:
    """Whether rows get shares of one, as in `(l * l.softmax(0)).sum()`: such a sum is no sum over
    rows, and that of a microbatch is as large as that of the whole batch."""
    calls = (Call(one, None, known, 1, frozenset()) for one in closure([loss], stop=()))
    return any(base_name(one.node) in SHARES and works_along_rows(one) for one in calls)
