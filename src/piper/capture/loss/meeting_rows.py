"""Where rows of a batch meet inside a model, so that a microbatch computes with its own rows only.

A loop that accumulates gradients does the same. Plain training on the whole batch does not.
"""

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
    causes = (_cause(Call(node, None, known, rows, frozenset())) for node in used)
    proved = (one for one in filter(None, causes) if guessed.isdisjoint(closure([one], stop=())))
    found = next(proved, None)
    return f"{line(found)} (aten.{base_name(found)})" if found is not None else ""


def _cause(call: Call) -> fx.Node | None:
    """The operation over several rows whose result is used for rows here."""
    if pairs_rows(call):
        return call.node
    if not _is_floating(call.node):
        return None
    if (found := _norm_in_use(call)) is not None or not value(call.node).dim():
        return found
    return call.node if works_along_rows(call) else _reduced_beside_rows(call)


def _norm_in_use(call: Call) -> fx.Node | None:
    """A norm over rows, of each column or beside rows, whose power is not what is used of it."""
    if call.known[call.node] != MIXED:
        return None
    norms = (one for one in call.node.all_input_nodes if isinstance(call.known[one], Root))
    return next((one for one in norms if value(one).dim() or value(call.node).dim()), None)


def _is_floating(node: fx.Node) -> bool:
    """Numbers of tokens and the order of tokens by experts have no gradient."""
    found = value(node)
    return isinstance(found, Tensor) and found.is_floating_point()


def _reduced_beside_rows(call: Call) -> fx.Node | None:
    """A sum or mean over rows that is combined with rows again, as in `x - x.mean(0)`."""
    inputs = call.node.all_input_nodes
    if call.known[call.node] != MIXED or not any(isinstance(call.known[n], Rows) for n in inputs):
        return None
    reduced = (node for node in inputs if isinstance(call.known[node], Reduced))
    return next(filter(_is_floating, reduced), None)
