"""The options that every builder takes, with their types, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

from piper.directives.order import Ahead
from piper.directives.replicate import Reduce
from piper.ir.placement.division import Attention
from piper.names import Device
from piper.strategies.device_mesh import Mesh
from piper.strategies.offloaded_stages import OffloadOption
from piper.strategies.recomputed_stages import RematOption


class PipelineOptions(TypedDict, total=False):
    """Options of every builder besides `pp`, `microbatches` and `dp`. All have defaults."""

    stages: Sequence[int] | None
    """How many layers each stage has. Default: None, stages that take about equally long."""

    microbatch_sizes: Sequence[int] | None
    """How many rows each microbatch has, up to a common factor. Default: None, equally many, or the
    first ones one more."""

    replica_sizes: Sequence[int] | None
    """How many rows the batch of each replica has, up to a common factor: `[3, 5]` gives the second
    of two replicas five rows for every three of the first. Default: None, equally many."""

    memory_gib: float | None
    """The most GiB that a device may hold, for parameters, gradients, Adam and activations.
    Only cuts into stages that fit are considered. Default: None, any."""

    speeds: Sequence[float] | None
    """How fast a device of each rank is, relative to the others: a rank of twice the speed gets
    twice the work. Default: None, all are equally fast."""

    mesh: Mesh | None
    """Which devices are neighbours: the axes of the job in the order of a PyTorch `DeviceMesh`, the
    last varying fastest. "pp,dp" puts the replicas of a stage side by side, "dp,pp,ep" those that
    divide experts. Default: None, which is "dp,pp": the stages of a replica are side by side."""

    devices: Sequence[Device] | None
    """The device at each place of the mesh, in its order. Default: None, which is 0, 1, 2, ..."""

    zero: int
    """ZeRO level of the replicas: 0 shards nothing (default), 1 optimizer state, 2 gradients too,
    3 parameters too."""

    reduce: Reduce | None
    """When gradients are reduced: for "each" microbatch, or "once" per step. Default: None, which
    is what the level says."""

    bucket_mb: float
    """Megabytes of one message between replicas. Default: 25."""

    gather_ahead: int
    """With zero=3, how many passes before their use parameters are gathered. Default: 1."""

    gather_buffers: int | None
    """With zero=3, for how many regions gathered parameters are held at once. Default: None, which
    is 2, and more where that does not raise the peak; all of them in a pipeline, where a known
    memory allows it."""

    tp: int
    """How many devices divide the weights of each stage (tensor parallelism). They get the same
    batch. Default: 1."""

    cp: int
    """How many devices divide the tokens of each stage (context parallelism). They get the same
    batch. Default: 1."""

    cp_attention: Attention | None
    """How devices that divide tokens attend to each other's, as `attention` of `Shard`: "ring" or
    "zigzag". Default: None, an exchange of heads where they divide."""

    ep: int
    """How many replicas divide the experts of a stage (regions tagged EP) among them. It must
    divide `dp`. Default: 1, every replica has all experts."""

    expert_stages: Iterable[int] | None
    """The stages that have experts. Default: None, all stages."""

    ahead: Ahead | None
    """Whether the next pass may start while messages of `tp`, `cp` or `ep` travel, as `ahead` of
    `Order`. Default: None, which means True where there are any. "pairs" overlaps more and
    needs more memory."""

    remat: RematOption
    """What backwards recompute: True for everything, "matmuls", "attention" or a share from 0 to 1
    for what is kept anyway (`keep` of `Remat`), "auto" for what does not fit in memory, or a list
    of stages. Default: False, nothing."""

    offload: OffloadOption
    """What waits in host memory, as `what` of `Offload`: "activations", "optimizer",
    "parameters", or a list of these. Default: None, nothing."""

    stream: str
    """The stream of transfers between stages. Default: "pp"."""

    tp_stream: str
    """The stream of the messages of `tp`. Default: "tp"."""

    cp_stream: str
    """The stream of the messages of `cp`. Default: "cp"."""

    ep_stream: str
    """The stream of the token all-to-alls. Default: "ep"."""

    reduce_stream: str
    """The stream of gradient reductions. Default: "dp"."""

    gather_stream: str
    """The stream of parameter all-gathers. Default: "gather"."""
