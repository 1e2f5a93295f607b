"""Options that other systems give a trainer, and that are no options here: what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.errors import meant_by
from piper.strategies.options import PipelineOptions

LOOP = (
    "write a loop over your batches that calls trainer.step(batch); for rehearse, give a batch for "
    "each step"
)
DATA = "leave it out: your own loop reads the loader, and gives each batch to trainer.step"
PLACES = "leave it out: the strategy says which device has which layers"
SAVED = "leave it out: write trainer.save(folder) in your loop, and trainer.resume(folder) before"
LOADED = (
    "leave it out; or load the model with transformers, and give it to "
    "piper.Trainer(model, None, strategy, example=batch)"
)
UNQUANTIZED = (
    "give a folder with weights that are not quantized: dtype=torch.bfloat16 keeps them in 16 "
    "bits, and adapter=peft.LoraConfig(...) trains little"
)
ALWAYS = "leave it out: Piper does this by itself"
FIXES = {
    LOOP: (
        "steps", "num_steps", "epochs", "num_train_epochs", "max_steps", "max_epochs", "min_epochs",
        "num_epochs", "n_epochs", "min_steps", "total_steps", "train_steps", "training_steps",
        "max_train_steps", "iterations", "num_iterations", "max_iterations", "max_iters", "iters",
        "train_iters", "max_duration",
    ),
    DATA: (
        "batch_size", "train_batch_size", "per_device_train_batch_size", "global_batch_size",
        "loader", "dataloader", "data_loader", "train_loader", "train_dataloader", "dataset",
        "train_dataset", "train_data", "eval_dataset", "val_loader", "val_dataloader", "data",
        "training_data", "data_collator", "num_workers", "dataloader_num_workers",
    ),
    PLACES: ("device_map", "max_memory", "device_ids", "output_device", "placement"),
    SAVED: (
        "output_dir", "default_root_dir", "save_dir", "save_steps", "save_every", "checkpoint_dir",
        "enable_checkpointing", "resume_from_checkpoint", "ckpt_path", "save_total_limit",
    ),
    LOADED: (
        "attn_implementation", "trust_remote_code", "revision", "cache_dir", "token", "subfolder",
        "variant", "config", "ignore_mismatched_sizes", "local_files_only", "force_download",
    ),
    UNQUANTIZED: ("quantization_config", "load_in_8bit", "load_in_4bit"),
    ALWAYS: (
        "low_cpu_mem_usage", "use_safetensors", "find_unused_parameters", "backend", "sync_batch",
        "broadcast_buffers", "static_graph", "gradient_as_bucket_view", "use_distributed_sampler",
        "model_parameters", "params", "use_orig_params",
    ),
    "write log=...": ("logger", "loggers", "report_to", "wandb", "tensorboard", "callbacks"),
}  # fmt: skip
FIX_OF = {name: fix for fix, names in FIXES.items() for name in names}
PROCESSES = (
    "devices", "num_devices", "n_devices", "gpus", "num_gpus", "n_gpus", "n_gpu", "num_processes",
    "nproc", "nproc_per_node", "world_size", "ngpus",
)  # fmt: skip
KINDS = ("accelerator", "device_type", "use_cuda", "use_gpu", "cuda", "no_cuda", "use_cpu", "cpu")
CPUS = ("cpu", "no_cuda", "use_cpu")
PIPELINE = ("pp", "microbatches", "dp", *PipelineOptions.__annotations__)


def need_none(name: str, given: Mapping[str, Any]) -> str | None:
    """What to do instead of giving this option.

    >>> need_none("devices", {"devices": 2})
    'leave it out: `piper run -n 2` starts 2 processes, and the strategy says what each of them has'
    >>> need_none("accelerator", {"accelerator": "gpu"})
    'write device="cuda"'
    >>> need_none("zero_stage", {"zero_stage": 3})
    'write zero=3 in the strategy, such as strategies.one_f_one_b(pp=1, dp=2, zero=3, ...)'
    """
    if name in PROCESSES:
        return processes_fix(given[name])
    if name in KINDS:
        return f'write device="{device_of(name, given[name])}"'
    if name in FIX_OF:
        return FIX_OF[name]
    return pipeline_fix(name, given[name])


def processes_fix(count: Any) -> str:
    many = count if type(count) is int and count > 1 else len(count) if is_listed(count) else "N"
    started = "the processes" if many == "N" else f"{many} processes"
    return (
        f"leave it out: `piper run -n {many}` starts {started}, and the strategy says what each of "
        "them has"
    )


def is_listed(found: Any) -> bool:
    return isinstance(found, list | tuple)


def device_of(name: str, value: Any) -> str:
    """
    >>> device_of("accelerator", "cpu"), device_of("use_cuda", True), device_of("use_cpu", True)
    ('cpu', 'cuda', 'cpu')
    """
    return "cpu" if (name in CPUS) == (value is not False) or value == "cpu" else "cuda"


def pipeline_fix(name: str, value: Any) -> str | None:
    """An option of builders."""
    ours = next(iter(meant_by(name, PIPELINE)), None)
    if ours is None:
        return None
    own = f"{ours}={value!r}" if isinstance(value, int | float | str) else f"{ours}=..."
    first = "" if ours == "pp" else "pp=1, dp=2, " if ours == "zero" else "pp=1, "
    return f"write {own} in the strategy, such as strategies.one_f_one_b({first}{own}, ...)"
