"""DeepSpeed beside Piper: ZeRO 1 to 3, and its 1F1B pipeline.

In bfloat16, weights, gradients and AdamW's state are bfloat16, as everywhere in these benchmarks.
DeepSpeed's own default keeps float32 copies; `master` asks for it.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_models import Data, Size, Whole


def deepspeed(arena: Arena) -> Any:
    logging.disable(logging.WARNING)
    import deepspeed

    if not arena.on_gpu:  # it would compile a kernel of its own for messages in shared memory
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    backend = "nccl" if arena.on_gpu else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    return deepspeed


def settings(
    arena: Arena, parts: int, rows: int, stage: int, replicas: int, master: bool
) -> dict[str, Any]:
    """Its configuration, with its defaults but for one.

    By default it clips gradients to a norm of 1. AdamW's first update hides that: the second loss
    is the same, and the third is not.
    """
    config: dict[str, Any] = {
        "train_batch_size": rows * parts * replicas,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": parts,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if arena.dtype == torch.bfloat16 and stage:
        same = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        config["bf16"] = {"enabled": True, **({} if master else same)}
        if not master:
            config["data_types"] = {"grad_accum_dtype": "bf16"}
    return config


def zero(
    arena: Arena,
    model: Whole,
    data: Data,
    parts: int,
    stage: int,
    master: bool = False,
    **options: Any,
) -> Contender:
    """All ranks are replicas. `options` are those of its "zero_optimization"."""
    mine = copy.deepcopy(model).to(arena.device)
    config = settings(arena, parts, data[0].shape[0] // parts, stage, arena.world, master)
    config["zero_optimization"] |= options
    optimizer = arena.adamw(mine.parameters())
    engine, *_ = deepspeed(arena).initialize(model=mine, optimizer=optimizer, config=config)
    return stepping(arena, engine, model.loss, data, parts)


def stepping(
    arena: Arena, engine: Any, loss_fn: Callable[..., torch.Tensor], data: Data, parts: int
) -> Contender:
    """Microbatch by microbatch; its engine knows which is the last one."""

    def step() -> torch.Tensor:
        given = [tensor.to(arena.device, non_blocking=True).chunk(parts) for tensor in data]
        losses = []
        for tokens, labels in zip(*given, strict=True):
            loss = loss_fn(engine(tokens), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().clone())
        return torch.stack(losses).mean()

    return Contender(step, close=partial(taken_apart, engine))


def pipeline(
    arena: Arena, model: Whole, size: Size, parts: int, pp: int, stage: int, master: bool = False
) -> Contender:
    """1F1B; each cut is a layer of its PipelineModule. Rank = stage * replicas + replica."""
    engines = deepspeed(arena)
    from deepspeed.pipe import PipelineModule

    replicas = arena.world // pp
    tokens, labels = size.batch(arena.rank % replicas, parts)
    layers = [copy.deepcopy(cut) for cut in model.cuts]
    whole = PipelineModule(
        layers, num_stages=pp, loss_fn=model.loss, partition_method="uniform",
        activation_checkpoint_interval=0,
    )  # fmt: skip
    whole.to(arena.device)
    config = settings(arena, parts, tokens.shape[0] // parts, stage, replicas, master)
    optimizer = arena.adamw([p for p in whole.parameters() if p.requires_grad])
    engine, *_ = engines.initialize(model=whole, optimizer=optimizer, config=config)
    pairs = list(zip(tokens.chunk(parts), labels.chunk(parts), strict=True))
    return Contender(
        lambda: engine.train_batch(data_iter=iter(pairs)), close=partial(taken_apart, engine)
    )


def taken_apart(engine: Any) -> None:
    """Otherwise its hooks and buffers keep the model alive."""
    try:
        engine.destroy()
    except Exception as error:
        print(f"  deepspeed: destroy: {error}", flush=True)
    if hasattr(engine.optimizer, "optimizer"):
        engine.optimizer.optimizer = None
    engine.optimizer = None
    for parameter in engine.module.parameters():
        parameter.grad = None
