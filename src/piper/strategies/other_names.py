"""What others call strategies, and which builder it is here."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from piper.errors import NoAttribute, Problem, did_you_mean, meant_by, nearest

BUILD = "strategies.one_f_one_b(pp=1, {}, microbatches=1)"
OPTIONS = {
    "dp=N": (
        "ddp", "dp", "data_parallel", "replicate", "ddp_spawn", "distributed_data_parallel",
        "no_shard", "mirrored", "hvd", "horovod",
    ),
    "dp=N, zero=1": ("zero1", "zero_1"),
    "dp=N, zero=2": ("zero2", "zero_2", "shard_grad_op", "deepspeed_stage_2"),
    "dp=N, zero=3": (
        "fsdp", "fsdp2", "fully_shard", "zero", "zero3", "zero_3", "full_shard", "deepspeed",
        "deepspeed_stage_3", "fully_sharded_data_parallel",
    ),
    "tp=N": ("tp", "tensor_parallel", "tensor_parallelism"),
    "cp=N": ("cp", "context_parallel", "sequence_parallel", "sp"),
    "dp=N, ep=N": ("ep", "expert_parallel", "expert_parallelism", "moe"),
}  # fmt: skip
SCHEDULES = {
    "one_f_one_b(pp=N, microbatches=2 * N)": ("pp", "pipeline", "pipeline_parallel", "pipedream"),
    "one_f_one_b": ("f1b1", "onefoneb", "one_f1b", "onef1b", "OneFOneB", "Schedule1F1B"),
    "interleaved_one_f_one_b": ("interleaved", "interleaved_1f1b", "ScheduleInterleaved1F1B"),
    "zb_h1": ("zero_bubble", "zb", "zbh1", "ZBH1"),
    "zbv": ("zb_v", "zero_bubble_v", "ScheduleZBVZeroBubble"),
    "dualpipev": ("dual_pipe_v", "dualpipe_v", "DualPipeV", "ScheduleDualPipeV"),
}
MEANT = {name: BUILD.format(how) for how, names in OPTIONS.items() for name in names}
MEANT |= {name: f"strategies.{how}" for how, names in SCHEDULES.items() for name in names}
SIZES = "(pp=2, microbatches=8)"  # an example of what builders need
EXAMPLE = f"write piper.strategies.one_f_one_b{SIZES}, or a list of directives"
STARTED = "leave it out: `piper run train.py -n 2` starts processes, and a Trainer connects them"
TRAINER = "write trainer = piper.Trainer(model, loss_fn, strategy, example=batch)"
STEP = f"{TRAINER}, and in your loop trainer.step(batch)"
OF_PIPER = {  # what other systems have at this place
    STARTED: (
        "init", "initialize", "init_process_group", "init_distributed", "setup", "spawn", "run",
        "destroy_process_group", "shutdown", "init_device_mesh",
    ),
    TRAINER: (
        "prepare", "wrap", "parallelize", "distribute", "Accelerator", "Engine", "engine", "Fabric",
        "distributed_model", "prepare_model", "compile",
    ),
    STEP: ("train", "fit", "train_step", "train_batch", "backward", "step"),
    "write trainer.rank, trainer.replica and trainer.replicas": (
        "rank", "get_rank", "local_rank", "get_local_rank", "world_size", "get_world_size",
    ),
    "write trainer.save(folder), and trainer.resume(folder)": (
        "save", "load", "save_checkpoint", "load_checkpoint", "resume",
    ),
    f"write piper.strategies.one_f_one_b{SIZES}, or piper.Strategy([...]) of directives": (
        "strategy", "schedule", "schedules", "parallel", "builders",
    ),
}  # fmt: skip


def missing(module: ModuleType, name: str) -> AttributeError:
    """
    >>> import piper
    >>> print(missing(piper, "fsdp"))
    strategies: there is no fsdp
      fix: write strategies.one_f_one_b(pp=1, dp=N, zero=3, microbatches=1)
    """
    if found := known_as(name):
        return NoAttribute.of("strategies", f"there is no {name}", f"write {found}")
    near = did_you_mean(nearest(name, module.__all__))
    builders = [one for one in module.__all__ if is_builder(getattr(module, one))]
    text = near or f"; builders are {', '.join(sorted(builders))}" * (name[0] != "_")
    return AttributeError(f"module 'piper.strategies' has no attribute {name!r}{text}", name=name)


def is_builder(one: object) -> bool:
    return callable(one) and "microbatches" in getattr(one, "__annotations__", {})


def missing_in_piper(name: str, known: Sequence[str]) -> AttributeError:
    """
    >>> print(missing_in_piper("DDP", []))
    piper: there is no DDP
      fix: write piper.strategies.one_f_one_b(pp=1, dp=N, microbatches=1)
    """
    fix = next((fix for fix, names in OF_PIPER.items() if name in names), None)
    if fix is None and (found := known_as(name)):
        fix = f"write piper.{found}"
    if fix is not None:
        return NoAttribute.of("piper", f"there is no {name}", fix)
    near = did_you_mean(nearest(name, known))
    return AttributeError(f"module 'piper' has no attribute {name!r}{near}", name=name)


def known_as(name: str) -> str | None:
    """What is called so elsewhere, also with other capitals and dashes."""
    return None if name[:1] == "_" else MEANT.get(name) or PLAIN.get(plain(name))


def plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


PLAIN = {plain(name): how for name, how in MEANT.items()}


def named(text: str, builders: Mapping[str, Callable[..., Any]]) -> str:
    """What to write for a strategy that is a text.

    >>> print(named("fsdp", {}))
    write piper.strategies.one_f_one_b(pp=1, dp=N, zero=3, microbatches=1)
    """
    if Path(text).suffix == ".json":
        return f"write piper.Strategy.from_json(Path({text!r}).read_text())"
    found = [builders[one].__name__ for one in meant(text, builders)]
    if len(found) != 1 and (other := known_as(text)):
        return f"write piper.{other}{SIZES if other[-1] != ')' else ''}"
    either = " or ".join(f"piper.strategies.{one}{SIZES}" for one in found)
    return f"write {either}" if found else EXAMPLE


def configured(config: Mapping[Any, Any]) -> str:
    """The call of a builder that means a configuration of other systems.

    >>> print(configured({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4}))
    write piper.strategies.one_f_one_b(pp=1, dp=N, zero=3, microbatches=4)
    """
    found: dict[str, Any] = {"pp": 1, "dp": "N"}
    for name, value in config.items():
        number = value.get("stage") if isinstance(value, Mapping) else value
        if type(number) is int:
            found |= dict.fromkeys(meant_by(str(name), OF_CONFIGURATIONS), number)
    found["microbatches"] = found.pop("microbatches", 1)
    options = ", ".join(f"{name}={value}" for name, value in found.items())
    return f"write piper.strategies.one_f_one_b({options})"


OF_CONFIGURATIONS = ("pp", "dp", "tp", "cp", "ep", "zero", "microbatches")


def meant(name: str, builders: Iterable[str]) -> list[str]:
    """The schedules that somebody may call so, who knows those of torch or of papers.

    >>> known = ["1f1b", "zb-h1", "interleaved-zb", "zbv"]
    >>> meant("1F1B", known), meant("zero-bubble", known), meant("2f2b", known)
    (['1f1b'], ['zb-h1', 'interleaved-zb', 'zbv'], [])
    """
    short = re.sub("^schedule", "", plain(name)).replace("zerobubble", "zb")
    known = {one.replace("-", ""): one for one in builders}
    if short in known:
        return [known[short]]
    found = [one for one in known if len(short) > 1 and short in one]
    return [known[one] for one in found or nearest(short, list(known))]


def no_schedule(name: object, builders: Iterable[str]) -> Problem:
    every = list(builders)
    fix = f"choose one of {', '.join(every)}{did_you_mean(meant(str(name), every))}"
    return Problem(f"there is no schedule {name!r}", fix)
