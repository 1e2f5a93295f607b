"""Stream: what a stream gets of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.names import COMPUTE, HIGH, NORMAL, Share


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream gets a share of the SMs of its GPU, and a priority. It may stand anywhere.

    `name` is that of messages (`Place`, `Replicate` and `Shard` say which), of which NCCL then
    uses at most `sms` SMs at once, or "compute", which then has `sms` SMs and no more. CPUs have
    neither: there it is ignored, with a note.

    rewrite:
        exchange [ep], F [compute]                    Stream("ep", sms=20, priority="high")
        -->                                           Stream("compute", sms=112)
        exchange [ep (20 SMs, high)], F [compute (112 SMs)]
    """

    name: str
    sms: int | None = None
    priority: str = NORMAL

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise Refused(Problem(f"stream {self.name!r} is no name", 'write Stream("ep", sms=20)'))
        if self.sms is not None and (type(self.sms) is not int or self.sms < 1):
            raise Refused(
                Problem(
                    f"sms={self.sms!r} is no number of SMs",
                    "write 1 or more, or leave it out: the stream may then use all of them",
                )
            )
        if self.priority not in (NORMAL, HIGH):
            raise Refused(
                Problem(f"{self.priority!r} is no priority", f'write "{NORMAL}" or "{HIGH}"')
            )
        if self.name == COMPUTE and self.sms is not None and self.priority == HIGH:
            raise Refused(
                Problem(
                    "compute has a part of the SMs and a priority: CUDA has no stream for both",
                    'leave out sms, or priority="high"; other streams may have both',
                )
            )

    @property
    def share(self) -> Share:
        return Share(self.name, self.sms, self.priority)

    def rewrite(self, dag: Dag) -> Dag:
        known = next((share for share in dag.streams if share.stream == self.name), None)
        if known is not None:
            raise Refused(
                Problem(
                    f"the stream {self.name!r} has a share already: {known}",
                    "let exactly one `Stream` name each stream",
                )
            )
        return dag.known_to(replace(dag, streams=(*dag.streams, self.share)))
