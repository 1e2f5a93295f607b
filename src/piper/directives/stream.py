"""Stream: the share of a GPU that a stream gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from piper.directives.arguments import require_stream_name
from piper.directives.base import Directive, directive
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.names import COMPUTE, HIGH, NORMAL, Share

Priority = Literal["normal", "high"]


@directive(example='Stream("pp", priority="high")')
@dataclass(frozen=True, slots=True)
class Stream(Directive):
    """A stream gets a share of the SMs of its GPU, and a priority. It may stand anywhere.

    `name` is a stream of messages, as `Place`, `Replicate` and `Shard` name them: NCCL then uses at
    most `sms` SMs for it. Or it is "compute", whose kernels then run on `sms` SMs only. On a CPU
    the directive is ignored, with a note.

    rewrite:
        all-to-all [ep], F [compute]                  Stream("ep", sms=20, priority="high")
        -->                                           Stream("compute", sms=112)
        all-to-all [ep (20 SMs, high)], F [compute (112 SMs)]
    """

    name: str
    sms: int | None = None
    priority: Priority = "normal"

    def __post_init__(self) -> None:
        require_stream_name(self.name, 'Stream("ep", sms=20)')
        if self.sms is not None and (type(self.sms) is not int or self.sms < 1):
            fix = "write 1 or more, or leave it out: the stream may then use all SMs"
            raise Refused(Problem(f"sms={self.sms!r} is not a number of SMs", fix))
        if self.priority not in (NORMAL, HIGH):
            fix = f'write "{NORMAL}" or "{HIGH}"'
            raise Refused(Problem(f"{self.priority!r} is not a priority", fix))
        if self.name == COMPUTE and self.sms is not None and self.priority == HIGH:
            raise Refused(
                Problem(
                    "CUDA cannot give the compute stream both a number of SMs and a priority",
                    'leave out sms or priority="high"; other streams may have both',
                )
            )

    @property
    def share(self) -> Share:
        return Share(self.name, self.sms, self.priority)

    def rewrite(self, dag: Dag) -> Dag:
        known = next((share for share in dag.streams if share.stream == self.name), None)
        if known is not None:
            fix = "name each stream in exactly one `Stream`"
            raise Refused(Problem(f"the stream {self.name!r} already has a share: {known}", fix))
        return dag.known_to(replace(dag, streams=(*dag.streams, self.share)))
