"""`capture`: from a model to regions with explicit graphs, step by step."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from piper.capture import refusals
from piper.capture.description.buckets import Bucketed, make_buckets
from piper.capture.description.described_regions import DescribedRegions, RegionSource
from piper.capture.description.description import number_tags, region_ids
from piper.capture.description.experts import ExpertCode, ExpertGraphs
from piper.capture.description.region_graphs import Lowered, lower
from piper.capture.fx_nodes import value
from piper.capture.graphs.division.divide import divided
from piper.capture.kernels.callables import Kernels, RegionCode
from piper.capture.loss import LossForm, coarse_loss, meeting_rows, model_form
from piper.capture.precision import Precision
from piper.capture.python_state.function_caches import forgetting
from piper.capture.regions.cut import Chunk, cut
from piper.capture.source_lines import warnings_at_users_lines
from piper.capture.trace.arguments.inputs import Inputs, spec_of
from piper.capture.trace.arguments.outputs import Output
from piper.capture.trace.cleanup import clean
from piper.capture.trace.forward import Loss, Traced, loss_graph, trace
from piper.capture.trace.gpu_kernels import with_gpu_kernels
from piper.capture.trace.randomness import make_reproducible
from piper.capture.trace.type_refusals import types_explained
from piper.capture.visits.journey import Visit, visit_of
from piper.garbage import collector_off
from piper.ir.model import Model, Region
from piper.ir.naming import RANDOM, RANK, batch_input
from piper.ir.placement.division import DivisionRequest
from piper.ir.remat_policy import RematPolicy
from piper.ir.sharding import Contract, contract
from piper.ir.values import Role, TensorSpec, Value
from piper.names import BW, F, Phase, RegionId, ValueId

LOSS = ValueId("loss")


@dataclass(frozen=True)
class Captured:
    """A model as data, and the functions that compute its regions."""

    model: Model
    inputs: Inputs
    aliases: dict[str, str]  # other names of tied parameters and buffers -> the name in buckets
    unused: tuple[str, ...]  # parameters and buffers that the loss does not depend on
    device: str
    kernels: Kernels
    dropouts: dict[RegionId, int]  # number of each region's first dropout
    form: LossForm  # how losses of microbatches become one
    experts: ExpertGraphs
    output: Output  # of the model, for one microbatch
    described: DescribedRegions
    visit: Visit  # for which batches
    meeting: str = ""  # where rows of a microbatch meet inside the model; empty: nowhere
    coarse_loss: str = ""  # the type of a model's own loss, if it has 16 bits
    unclear_draw: str = ""  # a line that draws numbers, if nothing says for which rows
    undivided: tuple[str, ...] = ()  # work in divided regions that each device does whole
    by_rows: tuple[str, ...] = ()  # attentions of which rows are divided, where tokens were asked
    others: Mapping[int, "Captured"] = field(default_factory=dict)  # for microbatches of such rows

    @property
    def was_read(self) -> int:
        """How many different regions were read from the cache."""
        lowered = (source.lowered for source in self.described.sources)
        return len({one.key for one in lowered if one.joint.was_read})

    @property
    def kept_state(self) -> list[str]:
        """Buffers that a forward updates, and whose values no result depends on."""
        read = {name for region in self.model.regions for name in region.reads_state}
        names = chain.from_iterable(one.lowered.chunk.updated for one in self.described.sources)
        return [name for name in dict.fromkeys(names) if name not in read]

    def model_with(self, policies: Iterable[RematPolicy]) -> Model:
        """The model, whose regions can then be recomputed under these policies."""
        wanted = tuple(dict.fromkeys(policies))
        others = {rows: other.model_with(wanted) for rows, other in self.others.items()}
        for one in self.others.values():
            self.kernels.graphs.update(one.kernels.graphs)
            self.experts.codes.update(one.experts.codes)
        regions = tuple(self.described.recomputed(self.model.regions, wanted))
        for region, source in zip(regions, self.described.sources, strict=True):
            for policy, other in region.recomputed.items():
                self.experts.vary(region.code, other.code, self.described.lowered(source, policy))
        return replace(self.model, regions=regions, others=others)

    def code(self, region: Region, ways: int = 1) -> RegionCode:
        """What computes a region, or one of so many shares of its experts.

        The region is that of the DAG: a directive may have replaced the one that was captured.
        """
        if ways > 1:
            share = RegionCode(region.code, ways)
            self.kernels.graphs.setdefault(share.graph, self.experts.get(region.code, ways))
            return share
        reads = ((phase, _random_position(region, phase)) for phase in Phase)
        random = tuple((phase, read) for phase, read in reads if read is not None)
        known = self.others.get(region.rows or 0, self)
        number = known.dropouts[region.twin or region.id]
        return RegionCode(region.code, dropout=number, random=random)


@collector_off()  # it would look at all of torch, and find next to nothing
@forgetting()
def of_sizes(found: Mapping[int, Captured]) -> Captured:
    """The model for microbatches of several sizes, that of the first with the others beside it."""
    (_, first), *others = found.items()
    return replace(first, others=dict(others)) if others else first


def of_known_sizes(found: Mapping[int, Captured | None]) -> Captured | None:
    """The same, if all were captured."""
    known = {rows: one for rows, one in found.items() if one is not None}
    return of_sizes(known) if known and len(known) == len(found) else None


def capture(
    model: nn.Module,
    loss_fn: Loss | None,
    example: tuple[Any, ...],
    device: str = "cpu",
    divide: Sequence[DivisionRequest] = (),
    precision: Precision | None = None,
    trained: Collection[str] | None = None,
    whole: frozenset[int] = frozenset(),
) -> Captured:
    """Trace the model on one microbatch, cut it into regions, and differentiate each.

    The loss is `loss_fn(model(*example[:-1]), example[-1])`, or `model(*example)` without loss_fn.
    Only shapes and dtypes matter. Weights may be on meta. Python numbers are constants. `divide`
    divides regions of the model as captured without it. Under a `precision`, parameters have its
    types, and so has the example. `trained`: what training updates, for evaluation. `whole`: uncut.
    """
    _require(device)
    with types_explained(model, precision, example), warnings_at_users_lines():
        with torch.set_grad_enabled(trained is None):  # a forward may ask for it
            traced = trace(model, loss_fn, example, device, precision, whole)
        form, meeting = _shown(traced, model, loss_fn)
        traced = _cleaned(traced, divide)
    lowered = lower(traced, chunks := cut(traced), forward_only=trained is not None)
    ids, runs = region_ids(tags := number_tags([chunk.path for chunk in chunks]))
    _refuse_shared_updates(traced, chunks, ids)
    names, values = _values(traced, chunks, ids)
    bucketed = make_buckets(traced, lowered, ids, trained)
    sources = tuple(map(RegionSource, lowered, bucketed.parts, zip(ids, tags, runs, strict=True)))
    made = DescribedRegions(names, values, sources)
    found = Model(regions=made.captured(), values=values, buckets=bucketed.buckets, loss=LOSS)
    return Captured(
        model=found,
        inputs=traced.inputs,
        aliases=traced.aliases,
        unused=bucketed.unused,
        device=device,
        kernels=Kernels(made.graphs),
        dropouts=dict(zip(ids, (chunk.first_dropout for chunk in chunks), strict=True)),
        form=form,
        experts=_experts(found, lowered, bucketed, traced.mode),
        output=traced.output,
        described=made,
        visit=visit_of(model, loss_fn, traced, trained is None),
        meeting=meeting,
        coarse_loss=coarse_loss(traced) if loss_fn is None else "",
        unclear_draw=traced.unclear_draw,
        undivided=traced.undivided,
        by_rows=traced.by_rows,
    )


def _shown(traced: Traced, model: nn.Module, loss_fn: Loss | None) -> tuple[LossForm, str]:
    """What a graph shows of the loss, and where rows meet."""
    form = model_form(traced, own=loss_fn is None)
    how = traced.device, traced.precision, loss_fn
    return form, meeting_rows(traced, lambda inputs: loss_graph(model, inputs, *how))


def _cleaned(traced: Traced, divide: Sequence[DivisionRequest]) -> Traced:
    clean(traced)
    make_reproducible(traced)
    found = divided(traced, divide) if divide else traced
    with_gpu_kernels(found)
    return found


def _experts(
    model: Model, lowered: Sequence[Lowered], bucketed: Bucketed, mode: Any
) -> ExpertGraphs:
    """The regions that can be divided by experts, judged by their inputs and outputs."""
    codes: dict[str, ExpertCode] = {}
    for region, known, (_, layout) in zip(model.regions, lowered, bucketed.parts, strict=True):
        if region.code not in codes:
            fits = contract(model, region)
            if isinstance(fits, Contract):
                codes[region.code] = ExpertCode(known, layout, fits, mode)
    return ExpertGraphs(codes)


def _require(device: str) -> None:
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise refusals.no_device(device)  # torch would abort the process


def _refuse_shared_updates(
    traced: Traced, chunks: Sequence[Chunk], ids: Sequence[RegionId]
) -> None:
    """An updated buffer must have one owner: copies on several devices would diverge."""
    weights = traced.weights
    for name in traced.updated:
        node = weights[name]
        users = {id: chunk for id, chunk in zip(ids, chunks, strict=True) if node in chunk.weights}
        writer = next(id for id, chunk in users.items() if node in chunk.updates)
        if len(users) > 1:
            raise refusals.shared_update(name, writer, [id for id in users if id != writer])


def _random_position(region: Region, phase: Phase) -> int | None:
    """The position of the random seed among the kernel's reads, if it has one."""
    if RANDOM not in region.inputs:
        return None
    index = region.inputs.index(RANDOM)
    if phase is F:
        return len(region.buckets) + index
    weight = phase is BW
    inputs = region.weight_inputs if weight else region.backward_inputs
    buckets = region.weight_buckets if weight else region.backward_buckets
    return len(buckets) + inputs.index(index) if index in inputs else None


def _values(
    traced: Traced, chunks: Sequence[Chunk], ids: Sequence[RegionId]
) -> tuple[dict[fx.Node, ValueId], dict[ValueId, Value]]:
    """Names and descriptions of the values that flow between regions."""
    names: dict[fx.Node, ValueId] = {}
    values: dict[ValueId, Value] = {}

    def add(node: fx.Node, name: str, role: Role = Role.ACTIVATION, index: int = 0) -> None:
        names[node] = ValueId(name)
        values[names[node]] = Value((spec_of(value(node)),), role, index)

    used = {node for chunk in chunks for node in chunk.inputs}
    for index, node in enumerate(traced.batch):
        if node in used:
            add(node, batch_input(index), Role.BATCH, index)
    if traced.random is not None:
        names[traced.random] = RANDOM
        values[RANDOM] = Value((TensorSpec((3,), "int64"),), Role.RANDOM)
    if traced.rank in used:
        add(traced.rank, RANK, Role.RANK)
    for chunk, region in zip(chunks, ids, strict=True):
        for index, node in enumerate(chunk.outputs):
            add(node, LOSS if node is traced.results[0] else f"{region}/{index}")
    return names, values
