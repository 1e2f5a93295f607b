"""Which regions recompute, what that frees and what it costs, as text."""

from __future__ import annotations

from collections.abc import Sequence

from piper.ir.dag import Dag
from piper.ir.model import Region
from piper.ir.remat_policy import Recomputation, RematPolicy, policy_text
from piper.names import B, F, amount
from piper.view.reports.footprint import size_text

SHOWN = 4  # names of regions in a line


def recomputation(dag: Dag) -> str:
    """A line for each policy. Empty if nothing is recomputed."""
    alike: dict[RematPolicy, list[Region]] = {}
    for region in dag.model.regions:
        if region.recomputes and not region.recomputes.auto:
            alike.setdefault(region.recomputes.keep, []).append(region)
    auto = [one.id for one in dag.model.regions if one.recomputes and one.recomputes.auto]
    lines = [group_text(keep, regions, dag) for keep, regions in alike.items()]
    if auto:
        lines.append(f"{names_text(auto)} would recompute, but everything fits: all is kept")
    return "\n".join(lines)


def group_text(keep: RematPolicy, regions: Sequence[Region], dag: Dag) -> str:
    """
    >>> flops_text(3.25e9)
    '3.25 GFLOP'
    """
    found = [one.recomputes for one in regions if one.recomputes]
    frees, more = sum(one.frees for one in found), sum(one.flops for one in found)
    whole = sum(plain_flops(region) for region in dag.model.regions)
    share = f" ({100 * more / whole:.0f} % of all)" if whole else ""
    does = "recompute, and keep" if len(regions) > 1 else "recomputes, and keeps"
    return (
        f"{names_text([one.id for one in regions])} {does} {policy_text(keep)}: "
        f"{freed_text(frees)}, {flops_text(more)} more{share}, per microbatch"
    )


def freed_text(frees: int) -> str:
    return f"{size_text(frees)} less" if frees >= 0 else f"{size_text(-frees)} more"


def plain_flops(region: Region) -> float:
    """FLOPs of a region's passes, without what is repeated."""
    again = region.recomputes.flops if region.recomputes else 0.0
    return region.flops.get(F, 0.0) + region.flops.get(B, 0.0) - again


def node_text(found: Recomputation | None) -> str:
    """What the backward of one region repeats, for the page."""
    if found is None or found.auto:
        return ""
    return f"{flops_text(found.flops)}, {freed_text(found.frees)}; keeps {policy_text(found.keep)}"


def names_text(names: Sequence[str]) -> str:
    """
    >>> names_text(["PP0", "PP1", "PP2", "PP3", "PP4"])
    'PP0, PP1, PP2, PP3 and 1 more region'
    """
    more = len(names) - SHOWN
    text = ", ".join(names[:SHOWN])
    return f"{text} and {amount(more, 'more region')}" if more > 0 else text


def flops_text(flops: float) -> str:
    for unit in ("", "K", "M", "G", "T"):
        if flops < 1000:
            return f"{flops:.3g} {unit}FLOP"
        flops /= 1000
    return f"{flops:.3g} PFLOP"
