"""What others call strategies, and which builder it is here."""

from types import ModuleType

from piper.errors import NoAttribute

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
    text = f"module 'piper.strategies' has no attribute {name!r}"
    return AttributeError(text, name=name, obj=module)
