"""The reference: plain training by autograd in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch

from piper.capture.source_lines import current_line
from piper.capture.trace.arguments.call_arguments import call, flatten, own_loss
from piper.capture.trace.arguments.inputs import name_of
from piper.job.batch.batch import Batch
from piper.job.batch.random_batches import chunk, microbatches
from piper.job.batch.user_weights import weight_of
from piper.job.job import Job
from piper.job.numerics.replica_buffers import ReplicaBuffers
from piper.runtime.torch_private import TorchDispatchMode, pytree


@dataclass
class Reference:
    """The results of plain PyTorch."""

    losses: list[list[float]] = field(default_factory=list)  # of each microbatch, by step
    loss: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step
    least: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # smallest absolute value over all steps
    most: dict[str, torch.Tensor] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    coarsest: torch.dtype = torch.float64
    line_of_coarsest: str = ""

    def warnings(self, dtype: torch.dtype) -> list[str]:
        """What to know about the comparison of a model that is in `dtype`."""
        return self._coarser_than(dtype) + self._not_finite()

    def _coarser_than(self, dtype: torch.dtype) -> list[str]:
        if torch.finfo(self.coarsest).eps <= torch.finfo(dtype).eps:
            return []
        mine, where = name_of(self.coarsest), self.line_of_coarsest
        line = f" ({where})" if where else ""
        return [f"compared to the digits of {mine}, since the model itself computes in it{line}"]

    def _not_finite(self) -> list[str]:
        if all(map(isfinite, self.loss)):
            return []
        return ["plain PyTorch's own loss is not finite on these data: give another example"]

    def note(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.detach().clone()
                self.gradients.setdefault(name, grad)
                size = grad.abs()
                self.least[name] = torch.minimum(self.least.get(name, size), size)
                self.most[name] = torch.maximum(self.most.get(name, size), size)


def plain(model: torch.nn.Module, job: Job, batches: Sequence[Batch]) -> Reference:
    """Autograd in one process, microbatch after microbatch, and one optimizer for everything."""
    found = Reference(initial={n: p.detach().clone() for n, p in model.named_parameters()})
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    options, parts = job.options, job.all_microbatches
    optimizer = options.optimizer(trained)
    scheduler = options.lr_scheduler(optimizer) if options.lr_scheduler else None
    types, buffers = Types(), ReplicaBuffers(model, job.strategy.microbatches)
    for batch in batches:
        optimizer.zero_grad()
        pieces = microbatches(batch, parts, sizes_of(job, batch))
        weights = None if is_joint(job, pieces) else weights_of(job, pieces)
        with types:
            whole, losses = accumulated(model, job, batch, pieces, weights, buffers)
        buffers.use(0)
        used = [p for _, p in trained if p.grad is not None]
        found.grad_norms.append(clipped(used, options.max_norm))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        found.note(model)  # after the step, like Piper's: it may change gradients
        found.losses.append(losses)
        found.loss.append(whole)
    found.coarsest, found.line_of_coarsest = types.coarsest, types.line
    found.final = {name: p.detach() for name, p in model.named_parameters()}
    found.buffers = {name: b.detach() for name, b in model.named_buffers()}
    return found


def sizes_of(job: Job, batch: Batch) -> list[tuple[int, ...]]:
    """The rows of each microbatch of every replica; empty if all are equal."""
    if job.rows.unequal:
        feeds = job.rows.divided(batch)
        return [job.rows.microbatches(one) for one in feeds for _ in range(job.feeds.parts)]
    one = job.rows.microbatches(chunk(batch, 0, job.replicas))
    return [one] if one else []


def clipped(parameters: Sequence[torch.Tensor], limit: float | None) -> float:
    """Clip as torch does, by a norm in double precision.

    torch's own norm is summed in the type of the gradients, which is inaccurate on a CPU.
    """
    norms = [p.grad.detach().double().norm() for p in parameters if p.grad is not None]
    norm = torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float64)
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


def loss_of(model: torch.nn.Module, job: Job, batch: Batch) -> Any:
    given = batch.arguments
    if job.loss_fn is None:
        return own_loss(call(model, given))
    return job.loss_fn(call(model, given[:-1]), given[-1])


def accumulated(
    model: torch.nn.Module,
    job: Job,
    batch: Batch,
    pieces: Sequence[Batch],
    weights: Sequence[float] | None,
    buffers: ReplicaBuffers,
) -> tuple[float, list[float]]:
    """Add up the gradients of a batch. Returns its loss, and that of each microbatch.

    Without weights, the loss function sees the outputs of all microbatches.
    """
    if weights is None:
        return joint(model, job, batch, pieces, buffers)
    losses = []
    for k, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
        buffers.use(k)
        loss = loss_of(model, job, piece)
        if weight:  # else it may be a mean over nothing
            (loss * weight).backward()
        losses.append(loss.item())
    return sum(w * v for w, v in zip(weights, losses, strict=True) if w), losses


def is_joint(job: Job, pieces: Sequence[Batch]) -> bool:
    """Whether the loss function itself can say how microbatches weigh."""
    said = job.options.loss_weight is not None or job.options.reduction is not None
    return job.loss_fn is not None and not said and len(pieces) > 1


def joint(
    model: torch.nn.Module, job: Job, batch: Batch, pieces: Sequence[Batch], buffers: ReplicaBuffers
) -> tuple[float, list[float]]:
    """One call of the loss function, on the outputs of all microbatches."""
    assert job.loss_fn is not None
    outputs = []
    for k, piece in enumerate(pieces):
        buffers.use(k)
        outputs.append(call(model, piece.arguments[:-1]))
    pairs = zip(outputs, pieces, strict=True)
    losses = [job.loss_fn(output, piece.arguments[-1]).item() for output, piece in pairs]
    with torch.no_grad():
        whole = call(copy.deepcopy(model), batch.arguments[:-1])
    loss = job.loss_fn(joined(outputs, whole), batch.arguments[-1])
    loss.backward()
    return loss.item(), losses


def joined(outputs: Sequence[Any], whole: Any) -> Any:
    """The outputs of microbatches in the form of the output for the whole batch: rows side by side,
    and what has no rows in the mean or the sum, whichever is closer to what the whole batch gives.

    The output for the whole batch itself differs where rows meet, as in batch norm.
    """
    leaves, specs = zip(*map(flatten, (whole, *outputs)), strict=True)
    found = [one_leaf(first, parts) for first, *parts in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(found, specs[0])


def one_leaf(whole: Any, parts: Sequence[Any]) -> Any:
    if not isinstance(whole, torch.Tensor):
        return whole
    sizes = enumerate(zip(whole.shape, parts[0].shape, strict=True))
    grows = next((dim for dim, (a, b) in sizes if a != b), None)
    if grows is not None:
        return torch.cat(list(parts), grows)
    total = torch.stack(list(parts)).sum(0)
    mean = total / len(parts)
    return total if (whole - total).norm() < (whole - mean).norm() else mean


def weights_of(job: Job, pieces: Sequence[Batch]) -> list[float]:
    """The factor of each microbatch in the loss of the batch, as docs/trainer.md defines it."""
    weight = job.options.loss_weight
    if weight is None and job.options.reduction is None and len(pieces) > 1:
        return counted_weights(job, pieces)
    own = [piece.rows or 1 if weight is None else weight_of(weight, piece) for piece in pieces]
    if job.options.reduction != "sum":
        return [one / sum(own) for one in own]
    return [1.0 if weight is None else 1.0 / sum(own) for _ in own]


def counted_weights(job: Job, pieces: Sequence[Batch]) -> list[float]:
    """The weights of a model's own loss, which only its graph shows."""
    captured = job.capture_part(pieces[0], ())
    reduction = job.reduction(captured.form)
    own = [weight for piece in pieces for weight in reduction.weights(piece, 1)]
    if reduction.is_plain_mean:
        own = [float(piece.rows or 1) for piece in pieces]
    return list(reduction.shares(own, sum(own)))


class Types(TorchDispatchMode):  # type: ignore[misc]
    """Remembers the coarsest floating-point type of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest, self.line = torch.float64, ""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self._see(leaf.dtype)
        return result

    def _see(self, dtype: torch.dtype) -> None:
        if torch.finfo(dtype).eps > torch.finfo(self.coarsest).eps:
            self.coarsest, self.line = dtype, current_line()
