"""Remat: recompute activations in the backward instead of keeping them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from piper.directives.arguments import Kept
from piper.directives.base import Directive, directive
from piper.directives.selection import require_whole_regions, selected
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.model import Region
from piper.ir.remat_policy import ATTENTION, MATMULS, NAMES, Recomputation, RematPolicy
from piper.ir.training import with_regions

AUTO = "auto"  # the compiler chooses for each region, within a limit of memory
UNDECIDED = Recomputation(1.0, auto=True)
# From these it chooses.
LADDER: tuple[RematPolicy, ...] = ((), 0.25, 0.5, 0.75, (MATMULS, ATTENTION))


@directive(omit_defaults=("keep", "memory_gib"), example="Remat(where())")
@dataclass(frozen=True, slots=True)
class Remat(Directive):
    """The backward of the matching regions recomputes their activations. It may stand anywhere.

    The forward keeps only the inputs of a region, and the few results that would differ if they
    were computed again (`topk`, `sort`). `keep` names more that is kept: "matmuls", "attention",
    both, "costly" (all but results of elementwise operators and norms), or a share of the
    bytes that the region keeps without `Remat`. If the backward is split, BI recomputes and BW
    reads what it needs from BI.

    With `keep="auto"` or a `memory_gib`, the compiler chooses for each region: it recomputes as
    little as fits in that much memory of a device, by default in what the device has.

    rewrite:
        x -> F -> activations -> B          Remat(where(PP=0))
        -->
        x -> F,  x -> B                     B runs the forward again, then the backward
    """

    filter: Filter
    keep: Kept = ()
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        limited = self.memory_gib is not None
        object.__setattr__(self, "keep", checked(self.keep) or (AUTO if limited else ()))
        if limited:
            require_limit(self.memory_gib, self.keep)

    @property
    def is_auto(self) -> bool:
        return self.keep == AUTO

    @property
    def policy(self) -> RematPolicy:
        assert not isinstance(self.keep, str), "the compiler chooses what it keeps"
        return self.keep  # type: ignore[return-value]

    def rewrite(self, dag: Dag) -> Dag:
        require_whole_regions(dag, self.filter, "`Remat` changes")
        names = dict.fromkeys(node.region for node in selected(dag, self.filter))
        regions = [dag.model.by_id[name] for name in names]
        again = [region.id for region in regions if region.recomputes]
        if again:
            fix = "match each region with at most one `Remat`"
            raise Refused(*(Problem(f"{name} is already recomputed", fix) for name in again))
        return with_regions(
            dag, {region.id: self.changed(region) for region in regions if region.has_backward}
        )

    def changed(self, region: Region) -> Region:
        if self.is_auto:
            return replace(region, recomputes=UNDECIDED)
        return region.recomputed[self.policy]


def policies_of(directives: Iterable[Directive]) -> tuple[RematPolicy, ...]:
    """All policies under which these directives recompute regions, or may do so."""
    found: dict[RematPolicy, None] = {}
    for one in directives:
        if isinstance(one, Remat):
            found.update(dict.fromkeys(LADDER if one.is_auto else (one.policy,)))
    return tuple(found)


def checked(keep: object) -> Kept:
    """What a user wrote, as one name of each kind or a share."""
    if keep == AUTO:
        return AUTO
    if isinstance(keep, int | float) and not isinstance(keep, bool) and 0 <= keep <= 1:
        return float(keep) or ()
    names = (keep,) if isinstance(keep, str) else keep
    if isinstance(names, list | tuple) and all(name in NAMES for name in names):
        return tuple(name for name in NAMES if name in names)
    raise Refused(
        Problem(
            f"keep={keep!r} is not something that can be kept",
            'write "costly", "matmuls", "attention", "topk", a list of these, a share such as 0.5, '
            'or "auto"',
        )
    )


def require_limit(limit: object, keep: Kept) -> None:
    if keep != AUTO:
        raise Refused(Problem('memory_gib is for keep="auto" only', "leave out one of them"))
    if isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0:
        what = f"memory_gib={limit!r} is not an amount of memory"
        raise Refused(Problem(what, "write GiB of one device, such as 80"))
