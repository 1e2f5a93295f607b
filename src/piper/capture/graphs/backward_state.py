"""What the user's own backwards change in Python, a captured step does not repeat.

So a backward that changes something is traced once more, from the state that it left. If it then
computes the same, and changes nothing more, then so does every later step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from piper.capture import function_refusals as refusals
from piper.capture.fx_nodes import line
from piper.capture.graphs.fingerprint import fingerprint
from piper.capture.python_state import carried
from piper.capture.python_state.operator_code import found_by_running
from piper.capture.python_state.places import Root
from piper.capture.python_state.reach import Reach, places, reach_of
from piper.capture.python_state.snapshot import Change, Snapshot
from piper.capture.torch_private import OpOverload, is_custom, is_plain_call, own_buffers
from piper.capture.trace.custom_functions import given_to, is_function
from piper.errors import CaptureError

Make = Callable[[], fx.GraphModule]


def settled(graph: fx.Graph, make: Make) -> fx.GraphModule:
    """A derivative that is the same in the next step. Python state stays as it was."""
    calls = [node for node in graph.nodes if _is_users(node.target)]
    if not calls:
        return make()
    if all(is_function(node.target) or is_custom(node.target) for node in calls):
        return _settled(calls, make)
    with found_by_running() as new:  # kernels of `Library.impl`
        made = _settled(calls, make)
    return _settled(calls, make) if new else made


def _settled(calls: list[fx.Node], make: Make) -> fx.GraphModule:
    reach = reach_of(*(one for node in calls for one in given_to(node.target)))
    buffers = Reach(_buffers(reach))
    with _restored(buffers) as kept, _restored(reach) as before:
        made = make()
        after = Snapshot(reach)
        changes = [one for one in before.differences(after) if reach.reads(one.place.names)]
        wrong = list(kept.changes(Snapshot(buffers)))
        if changes and not wrong:
            wrong = [] if _is_same(made, make) else changes
            wrong += carried.changing(after, Snapshot(reach), reach, "backward")
        if wrong:
            raise _refusal(wrong[0], reach, line(calls[0]))
    return made


def _buffers(reach: Reach) -> list[Root]:
    """Those of modules. A forward may update them, a backward may not."""
    modules = [one.value for one in places(reach) if isinstance(one.value, nn.Module)]
    return [Root(held, name, name, ()) for held in map(own_buffers, modules) for name in held]


def _is_users(target: Any) -> bool:
    return isinstance(target, OpOverload) and (is_function(target) or not is_plain_call(target))


@contextmanager
def _restored(reach: Reach) -> Iterator[Snapshot]:
    before = Snapshot(reach)
    try:
        yield before
    finally:
        before.restore()


def _is_same(made: fx.GraphModule, make: Make) -> bool:
    try:
        return fingerprint(make()) == fingerprint(made)
    except Exception:  # it does not run with the state of the first one
        return False


def _refusal(change: Change, reach: Reach, where: str) -> CaptureError:
    found = carried.line_of(change, reach)
    return refusals.changed_in_backward(found or where, change.place.path)
