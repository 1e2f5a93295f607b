"""What others call strategies, and which builder it is here."""

import re
from collections.abc import Iterable
from types import ModuleType

from piper.errors import NoAttribute, Problem, did_you_mean, nearest

BUILD = "strategies.one_f_one_b(pp=1, {}, microbatches=1)"
OPTIONS = {
    "dp=N": ("ddp", "dp", "data_parallel", "replicate"),
    "dp=N, zero=1": ("zero1", "zero_1"),
    "dp=N, zero=2": ("zero2", "zero_2"),
    "dp=N, zero=3": ("fsdp", "fsdp2", "fully_shard", "zero", "zero3", "zero_3"),
    "tp=N": ("tp", "tensor_parallel", "tensor_parallelism"),
    "cp=N": ("cp", "context_parallel", "sequence_parallel", "sp"),
    "dp=N, ep=N": ("ep", "expert_parallel", "expert_parallelism", "moe"),
}
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


def missing(module: ModuleType, name: str) -> AttributeError:
    """
    >>> import piper
    >>> print(missing(piper, "fsdp"))
    strategies: there is no fsdp
      fix: write strategies.one_f_one_b(pp=1, dp=N, zero=3, microbatches=1)
    """
    if name in MEANT:
        return NoAttribute.of("strategies", f"there is no {name}", f"write {MEANT[name]}")
    near = did_you_mean(nearest(name, module.__all__))
    return AttributeError(f"module 'piper.strategies' has no attribute {name!r}{near}", name=name)


def meant(name: str, builders: Iterable[str]) -> list[str]:
    """The schedules that somebody may call so, who knows those of torch or of papers.

    >>> known = ["1f1b", "zb-h1", "interleaved-zb", "zbv"]
    >>> meant("1F1B", known), meant("zero-bubble", known), meant("2f2b", known)
    (['1f1b'], ['zb-h1', 'interleaved-zb', 'zbv'], [])
    """
    plain = re.sub(r"^schedule|[\W_]", "", name.lower()).replace("zerobubble", "zb")
    known = {one.replace("-", ""): one for one in builders}
    if plain in known:
        return [known[plain]]
    found = [one for one in known if len(plain) > 1 and plain in one]
    return [known[one] for one in found or nearest(plain, list(known))]


def no_schedule(name: object, builders: Iterable[str]) -> Problem:
    every = list(builders)
    fix = f"choose one of {', '.join(every)}{did_you_mean(meant(str(name), every))}"
    return Problem(f"there is no schedule {name!r}", fix)
