"""TorchTitan beside Piper: its parallelize_llama and pipeline_llm, and the step of its Trainer.

Clipping is left out. Its packages for data and logs are not needed, so they are replaced.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_models import Size, Whole
from torch import Tensor, nn

from piper.models.llama import rotary_tables

NOT_CALLED = (
    "torch.utils.tensorboard", "datasets", "datasets.distributed", "tokenizers", "wandb",
    "torchdata", "torchdata.stateful_dataloader", "tyro", "tomli", "PIL", "safetensors", "absl",
)  # fmt: skip
EXPERT_KERNELS = "torchtitan.models.moe.kernels"  # in Triton
NAMED = ("flex_attention", "inductor_compiled_code")  # in a list of what to save
MESHES: dict[int, Any] = {}


class NotCalled(ModuleType):
    """Stands for a package that is imported and not called."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def importable() -> None:
    """Whatever TorchTitan imports at its top is there."""
    logging.getLogger().setLevel(logging.ERROR)
    for name in NOT_CALLED:
        try:
            importlib.import_module(name)
        except Exception:
            sys.modules[name] = NotCalled(name)
    if importlib.util.find_spec("triton") is None:  # on a CPU
        sys.modules[EXPERT_KERNELS] = NotCalled(EXPERT_KERNELS)
    operators: Any = torch._higher_order_ops
    for name in NAMED:
        if not hasattr(operators, name):
            setattr(operators, name, None)


class Titan(nn.Module):
    """The same layers, by the names that TorchTitan cuts and shards by."""

    def __init__(self, model: Whole, config: Any) -> None:
        super().__init__()
        cuts: list[Any] = list(model.cuts)
        blocks = [block for cut in cuts for block in cut.blocks]
        self.tok_embeddings = cuts[0].embedding
        self.layers = nn.ModuleDict({str(k): block for k, block in enumerate(blocks)})
        self.norm, self.output = cuts[-1].norm, cuts[-1].head
        self.config = config
        self.model_args = SimpleNamespace(n_layers=len(blocks), attn_type="sdpa")

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        cos, sin = rotary_tables(self.config, x[..., 0], x.dtype)
        for block in self.layers.values():
            x = block(x, cos, sin)
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if self.output is not None else x


def mesh(arena: Arena, pp: int) -> Any:
    """Made once, because every mesh has its own communicators."""
    importable()
    import torchtitan.distributed.parallel_dims as dims

    dims.device_type = arena.device.type
    if pp not in MESHES:
        MESHES[pp] = dims.ParallelDims(
            dp_replicate=1, dp_shard=arena.world // pp, cp=1, tp=1, pp=pp, ep=1, etp=1,
            world_size=arena.world,
        )  # fmt: skip
        MESHES[pp].build_mesh()
    return MESHES[pp]


def configured(arena: Arena, size: Size, rows: int, reshard: str) -> Any:
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.training.local_batch_size, job.training.seq_len = rows, size.length
    name = str(arena.dtype).removeprefix("torch.")
    job.training.mixed_precision_param = job.training.mixed_precision_reduce = name
    job.activation_checkpoint.mode = "none"
    job.compile.enable = False
    job.parallelism.fsdp_reshard_after_forward = reshard
    return job


def sums(modules: Iterable[nn.Module]) -> None:
    """TorchTitan asks FSDP to multiply while it reduces, by one.

    Gloo cannot do that. On the H200, losses stayed the same in every step with it.
    """
    for module in (part for whole in modules for part in whole.modules()):
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


def fsdp(arena: Arena, model: Whole, size: Size, parts: int, reshard: str = "default") -> Contender:
    """All ranks are replicas; gradients are accumulated over microbatches as its Trainer does."""
    dims = mesh(arena, 1)
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama

    tokens, labels = size.batch(arena.rank, parts)
    job = configured(arena, size, tokens.shape[0], reshard)
    whole = Titan(copy.deepcopy(model), size.config()).to(arena.device)
    module = parallelize_llama(whole, dims, job)
    sums([module])
    optimizer = arena.adamw(module.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        losses = []
        for given in zip(tokens.chunk(parts), labels.chunk(parts), strict=True):
            x, y = (tensor.to(arena.device, non_blocking=True) for tensor in given)
            loss = model.loss(module(x), y) / (parts * arena.world)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).sum() * arena.world

    return Contender(step)


def pipeline(
    arena: Arena, model: Whole, size: Size, parts: int, pp: int, schedule: str
) -> Contender:
    """Pipeline ranks times FSDP; by default it keeps parameters under pipelining."""
    dims, replicas = mesh(arena, pp), arena.world // pp
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama

    tokens, labels = size.batch(arena.rank % replicas, parts)
    job = configured(arena, size, tokens.shape[0], "default")
    job.parallelism.module_fqns_per_model_part = names(size, len(model.cuts))
    job.parallelism.pipeline_parallel_degree = pp
    job.parallelism.pipeline_parallel_schedule = schedule
    job.parallelism.pipeline_parallel_microbatch_size = tokens.shape[0] // parts
    whole = Titan(copy.deepcopy(model), size.config()).to(arena.device)

    def loss_fn(out: Tensor, wanted: Tensor) -> Tensor:
        return model.loss(out, wanted) / (parts * replicas)

    plan, modules, first, last = pipeline_llm(
        whole, dims, job, arena.device, whole.model_args, parallelize_llama, loss_fn
    )
    del whole
    sums(modules)
    optimizer = arena.adamw([p for module in modules for p in module.parameters()])

    def step() -> Any:
        optimizer.zero_grad()
        x, y = (tensor.to(arena.device, non_blocking=True) for tensor in (tokens, labels))
        targets, losses = (y, []) if last else (None, None)
        given = [x] if first else []
        plan.step(*given, target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).sum() * replicas if losses else float("nan")

    return Contender(step)


def names(size: Size, count: int) -> list[list[str]]:
    """The modules of each stage."""
    each = size.layers // count
    found = [[f"layers.{k * each + j}" for j in range(each)] for k in range(count)]
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "output"]
    return found
