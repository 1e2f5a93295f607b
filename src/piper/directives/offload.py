"""Offload: keep in host memory what a device needs again only later."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from piper.directives.arguments import require_count, require_free_stream
from piper.directives.base import Directive, directive
from piper.directives.selection import require_whole_regions, selected
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.host_copies import HostCopies, Offloaded

What = Literal["activations", "optimizer", "parameters"]


@directive(omit_defaults=("ahead", "buffers"), example='Offload(where(), "optimizer")')
@dataclass(frozen=True, slots=True)
class Offload(Directive):
    """What the matching regions need again only later waits in host memory. It may stand anywhere.

    "activations" are what a region keeps from its forward to its backward: they are stored after
    the forward and fetched before the backward. A value that would come back at once stays.
    "optimizer" is the optimizer state of the regions' parameters, with their masters: it is fetched
    before the update and stored after it. "parameters" are what passes compute with: they are
    fetched before each use, or their shard before each gather, and stored after the update.

    Copies run on `stream`. Those to the device start `ahead` passes before they are used. A device
    holds the copies of at most `buffers` passes at once, in each direction.

    rewrite:
        F ... B                                 Offload(where(PP=0))
        -->
        F -> store ... fetch -> B

        B -> Update                             Offload(where(PP=0), "optimizer")
        -->
        B, fetch -> Update -> store

        F ... B ... Update                      Offload(where(PP=0), "parameters")
        -->
        fetch -> F ... fetch -> B ... fetch -> Update -> store
    """

    filter: Filter
    what: What = "activations"
    stream: str = "offload"
    ahead: int = 1
    buffers: int = 2

    def __post_init__(self) -> None:
        if self.what not in tuple(Offloaded):
            what = f"what={self.what!r} cannot wait in host memory"
            fix = "write " + " or ".join(f'"{one}"' for one in Offloaded)
            raise Refused(Problem(what, fix))
        require_free_stream(self.stream, 'stream="offload"')
        require_count("ahead", self.ahead, 0)
        require_count("buffers", self.buffers, 1)

    @property
    def copies(self) -> HostCopies:
        return HostCopies(stream=self.stream, ahead=self.ahead, buffers=self.buffers)

    def rewrite(self, dag: Dag) -> Dag:
        require_whole_regions(dag, self.filter, "`Offload` moves what is kept between")
        regions = dict.fromkeys(node.region for node in selected(dag, self.filter))
        what = Offloaded(self.what)
        again = [region for region in regions if (what, region) in dag.offloads]
        if again:
            fix = f"match each region with at most one `Offload` of {what}"
            raise Refused(*(Problem(f"{name} is already offloaded", fix) for name in again))
        mine = {(what, region): self.copies for region in regions}
        return dag.known_to(replace(dag, offloads={**dag.offloads, **mine}))
