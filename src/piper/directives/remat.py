"""Remat: recompute activations in the backward instead of keeping them."""

from __future__ import annotations

from dataclasses import dataclass

from piper.directives.base import Directive, directive
from piper.directives.selection import require_whole_regions, selected
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.training import with_regions


@directive()
@dataclass(frozen=True, slots=True)
class Remat(Directive):
    """The backward of the matching regions recomputes their activations. It may stand anywhere.

    The forward keeps only the inputs of a region, and the few results that would differ if they
    were computed again (`topk`, `sort`). If the backward is split, BI recomputes and BW reads what
    it needs from BI.

    rewrite:
        x -> F -> activations -> B          Remat(where(PP=0))
        -->
        x -> F,  x -> B                     B runs the forward again, then the backward
    """

    filter: Filter

    def rewrite(self, dag: Dag) -> Dag:
        require_whole_regions(dag, self.filter, "`Remat` changes")
        names = dict.fromkeys(node.region for node in selected(dag, self.filter))
        regions = [dag.model.by_id[name] for name in names]
        again = [region.id for region in regions if region.recomputes]
        if again:
            fix = "match each region with at most one `Remat`"
            raise Refused(*(Problem(f"{name} is already recomputed", fix) for name in again))
        changed = {region.id: region.recomputed for region in regions}
        return with_regions(dag, {name: region for name, region in changed.items() if region})
