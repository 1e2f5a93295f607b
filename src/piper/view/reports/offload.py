"""What waits in host memory, and what that moves, as text."""

from __future__ import annotations

from collections.abc import Sequence

from piper.ir.dag import Dag
from piper.ir.host_copies import Offloaded
from piper.names import amount
from piper.plan.instructions import Fetch, Plan, Store
from piper.view.reports.footprint import size_text
from piper.view.reports.recomputation import names_text

WORDS = {
    Offloaded.ACTIVATIONS: "activations",
    Offloaded.OPTIMIZER: "optimizer state",
    Offloaded.PARAMETERS: "parameters",
}


def offload(dag: Dag, plans: Sequence[Plan]) -> str:
    """A line for each kind, and one for the copies of a step. Empty if nothing is offloaded."""
    lines = []
    for what in Offloaded:
        regions = [region for kind, region in dag.offloads if kind is what]
        if regions:
            lines.append(f"{WORDS[what]} of {names_text(regions)}: in host memory")
    if lines:
        lines.append(copies_text(plans))
    return "\n".join(lines)


def copies_text(plans: Sequence[Plan]) -> str:
    """The plans are of one device for each role."""
    ones = [one for plan in plans for one in plan.instructions]
    stores = [one for one in ones if isinstance(one, Store)]
    fetches = [one for one in ones if isinstance(one, Fetch)]
    if not stores:
        return "  nothing is copied: everything would come back at once"
    out, back = (sum(one.copied for one in some) for some in (stores, fetches))
    return (
        f"  {amount(len(stores), 'store')} ({size_text(out)}) and "
        f"{amount(len(fetches), 'fetch', 'fetches')} ({size_text(back)}) in a step, "
        f"on {amount(len(plans), 'device')}"
    )
