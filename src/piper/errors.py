"""Every error a user can see: where, what, and what to write instead."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Self, TypeVar

NUMBER = re.compile(r"\d+")
FEWEST_ALIKE = 2  # other regions for which a problem is not said again
MOST_TEXTS = 8  # of different problems
MOST_NAMES = 3  # of these
MOST_DEFAULTS = 3  # of arguments that are written out
BUG = "this is a bug of Piper, please report it with the strategy"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and how to fix it. There is no Problem without a fix."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}"


def said_once(problems: Sequence[Problem]) -> list[str]:
    """The same problem of many regions is said of the first one, with the names of some others.

    >>> print(*said_once([Problem(f"PP{k} has no device", f"place PP={k}") for k in range(24)]))
    PP0 has no device
      fix: place PP=0
      the same goes for PP1, PP2, PP3 and 20 more
    """
    alike: dict[tuple[str, ...], list[Problem]] = {}
    for one in problems:
        name, _, rest = one.what.partition(" ")
        alike.setdefault((NUMBER.sub("#", name), rest, NUMBER.sub("#", one.fix)), []).append(one)
    texts = [text for group in alike.values() for text in said_of(group)]
    left = len(texts) - MOST_TEXTS
    return texts if left <= 0 else [*texts[:MOST_TEXTS], f"there are {left} other problems"]


def said_of(alike: Sequence[Problem]) -> Iterator[str]:
    first, *others = alike
    if len(others) < FEWEST_ALIKE:
        yield from map(str, alike)
        return
    names = some_names([one.what.partition(" ")[0] for one in others])
    yield f"{first}\n  the same goes for {names}"


def some_names(names: Sequence[str]) -> str:
    """
    >>> some_names(["PP1", "PP2"]), some_names(["a", "b", "c", "d", "e"])
    ('PP1 and PP2', 'a, b, c and 2 more')
    """
    shown = list(names) if len(names) <= MOST_NAMES + 1 else list(names[:MOST_NAMES])
    last = f"{len(names) - len(shown)} more" if len(shown) < len(names) else shown.pop()
    return " and ".join(filter(None, (", ".join(shown), last)))


OTHER_WORDS = {  # what other systems call our options
    "max_norm": ("clip_norm", "clip_grad_norm", "max_grad_norm", "gradient_clipping", "clip"),
    "microbatches": (
        "accumulation_steps", "gradient_accumulation_steps", "accumulate", "grad_accum",
        "grad_accum_steps", "chunks", "accumulate_grad_batches", "microbatch_size",
        "micro_batch_size", "train_micro_batch_size_per_gpu", "per_device_train_batch_size",
    ),
    "adapter": ("adapters", "lora", "lora_config", "peft", "peft_config"),
    "model_class": ("architecture", "auto_class", "model_cls"),
    "dtype": ("torch_dtype", "weights_dtype", "param_dtype"),
    "compute": ("param_dtype", "dtype", "compute_dtype", "autocast_dtype"),
    "reduce": ("reduce_dtype", "grad_reduce_dtype"),
    "output": ("output_dtype",),
    "master": ("master_dtype", "master_weights"),
    "init": ("init_scale", "initial_scale", "scale"),
    "growth": ("growth_factor", "scale_factor"),
    "backoff": ("backoff_factor",),
    "interval": ("growth_interval", "scale_window", "loss_scale_window"),
    "n": ("microbatches", "num_microbatches", "chunks", "parts", "micro_batches"),
    "precision": (
        "mixed_precision", "amp", "autocast", "dtype", "torch_dtype", "bf16", "fp16", "half",
    ),
    "compiled": ("compile", "torch_compile", "jit"),
    "ema": ("ema_decay", "averaging", "averaged"),
    "seed": ("random_seed", "manual_seed", "rng_seed"),
    "memory_gib": ("memory", "memory_gb", "max_memory_gb"),
    "remat": ("recompute", "activation_checkpointing", "gradient_checkpointing", "checkpointing"),
    "loss_fn": ("loss", "criterion", "loss_function", "loss_func"),
    "lr_scheduler": ("schedule", "scheduler", "warmup"),
    "tp": ("tensor_parallel", "tensor_model_parallel_size"),
    "pp": ("pipeline_parallel", "pipeline_model_parallel_size"),
    "cp": ("context_parallel", "sequence_parallel"),
    "ep": ("expert_parallel", "expert_model_parallel_size"),
    "dp": ("data_parallel", "replicas", "replicate", "shard", "world_size", "num_gpus", "gpus"),
    "stages": ("stage", "num_stages"),
    "zero": ("zero_optimization", "sharding_strategy", "fsdp", "reshard_after_forward", "stage"),
}  # fmt: skip
AROUND = re.compile("^(num|n|use|with)_|_(size|degree|stage|level|parallel_(size|degree)|dim)$")


def no_option(what: str, name: str, known: Sequence[str]) -> Problem:
    """
    >>> print(no_option("a schedule", "zreo", ["dp", "zero"]))
    a schedule has no option zreo
      fix: write zero=...
    >>> no_option("it", "clip_norm", ["max_norm", "loss_fn"]).fix
    'write max_norm=...'
    >>> no_option("a schedule", "dpp", ["dp", "pp", "zero"]).fix
    'write dp=... or pp=...'
    >>> no_option("it", "pp_size", ["pp", "replica_sizes"]).fix
    'write pp=...'
    """
    near = meant_by(name, known) or nearest(name, known)
    choices = " or ".join(f"{one}=..." for one in near)
    fix = f"write {choices}" if near else f"it may have {', '.join(known)}"
    return Problem(f"{what} has no option {name}", fix)


def meant_by(name: str, known: Sequence[str]) -> list[str]:
    """The option that other systems call so, such as `pp_size` or `zero_stage`.

    >>> known = ["pp", "zero", "tp"]
    >>> meant_by("zero_stage", known), meant_by("tensor_parallel_size", known)
    (['zero'], ['tp'])
    """
    for one in (name, AROUND.sub("", name), AROUND.sub("_parallel", name)):
        if one in known:
            return [one]
        found = [ours for ours, others in OTHER_WORDS.items() if one in others and ours in known]
        if found:
            return found[:1]
    return []


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """All that are as near as the nearest one."""
    found = get_close_matches(name, known, 3)
    alike = [SequenceMatcher(None, one, name).ratio() for one in found]
    return sorted(one for one, ratio in zip(found, alike, strict=True) if ratio == alike[0])


def did_you_mean(names: Sequence[str]) -> str:
    """The end of a fix.

    >>> did_you_mean(["zb-h1", "zbv"]), did_you_mean([])
    ('; did you mean zb-h1 or zbv?', '')
    """
    *first, last = names or [""]
    either = f"{', '.join(first)} or {last}" if first else last
    return f"; did you mean {either}?" if names else ""


def wrong_call(
    name: str,
    call: Signature,
    args: Sequence[object],
    given: Mapping[str, object],
    example: str = "",
) -> Problem | None:
    """What is wrong with the arguments of a call, if its signature does not take them.

    `example`: a right call.

    >>> def place(filter, devices, stream="pp"): ...
    >>> from inspect import signature
    >>> print(wrong_call("Place", signature(place), [1], {"device": 0}))
    Place has no option device
      fix: write devices=...
    >>> print(wrong_call("Place", signature(place), [1], {}))
    Place: missing a required argument: 'devices'
      fix: write Place(filter, devices, stream='pp')
    """
    unknown = [one for one in given if one not in call.parameters]
    if unknown:
        return no_option(name, unknown[0], list(call.parameters))
    try:
        call.bind(*args, **given)
    except TypeError as error:
        shown = f", such as {example}" if example else ""
        return Problem(f"{name}: {error}", f"write {name}({', '.join(call_form(call))}){shown}")
    return None


def call_form(call: Signature) -> list[str]:
    """Arguments as a user writes them: all that are needed, and the first of the others."""
    needed = [one.name for one in call.parameters.values() if one.default is Parameter.empty]
    others = [one for one in call.parameters.values() if one.default is not Parameter.empty]
    shown = [f"{one.name}={one.default!r}" for one in others[:MOST_DEFAULTS]]
    return [*needed, *shown, *(["..."] if len(others) > MOST_DEFAULTS else [])]


class PiperError(Exception):
    """Base of every error Piper raises on purpose."""

    place = ""  # the line of a script, below the message, once a command knows it
    exit_code = 1  # of a command: 2 if what was typed is wrong, and no script or file


class NotSupported(PiperError):
    """A request that is not supported. The runner that catches it adds where."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(said_once(self.problems))


Refused = NotSupported  # what directives, rules and passes raise; users see the other name


class Located(NotSupported):
    """An error that knows which step raised it. Subclasses say what kind of step."""

    def __init__(self, where: str, *problems: Problem) -> None:
        super().__init__(*problems)
        self.where = where

    @classmethod
    def of(cls, where: str, what: str, fix: str) -> Self:
        """An error with one problem."""
        return cls(where, Problem(what, fix))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.where, *self.problems)

    def __str__(self) -> str:
        before = f"{self.where}: " if self.where else ""
        return "\n".join(f"{before}{problem}" for problem in said_once(self.problems))


class DirectiveError(Located):
    """A directive that cannot be applied to the DAG as it is at that point."""


class StrategyError(Located):
    """A strategy, schedule or JSON file that cannot be read or makes no sense by itself."""


class PassError(Located):
    """A compiler pass that cannot continue, because the strategy is incomplete."""


class PlanError(Located):
    """Plans that would deadlock or compute something else if they ran together."""


class CaptureError(Located):
    """A model that cannot be captured. `where` is the line of the user's model."""


class InputError(Located):
    """An argument or a batch that does not fit."""


T = TypeVar("T")


def saying_options(kind: type[T]) -> type[T]:
    """A class whose wrong arguments are errors that say what to write."""
    plain, call = kind.__init__, signature(kind)

    @wraps(plain)
    def checked(self: T, *args: Any, **given: Any) -> None:
        if wrong := wrong_call(kind.__name__, call, args, given):
            raise InputError(kind.__name__, wrong)
        plain(self, *args, **given)

    setattr(kind, "__init__", checked)  # noqa: B010
    return kind


class NoAttribute(InputError, AttributeError):
    """What other systems have, and what to write here. `hasattr` gives False for it."""


class ReplicaError(Located):
    """Replicas of a parameter that do not have the same bits any more."""


class RunError(PiperError):
    """A step that failed on a device. Names the device, the instruction and the region."""

    def __init__(self, device: int, instruction: str, reason: str) -> None:
        super().__init__(device, instruction, reason)
        self.device, self.instruction, self.reason = device, instruction, reason

    def __str__(self) -> str:
        at = " ".join(self.instruction.split())  # plans have columns
        return f"device {self.device} stopped at {at}\n  {self.reason}"


class ScriptFailed(PiperError):
    """The user's script raised an error of its own. It shows the user's lines only."""

    def __init__(self, script: str, report: str) -> None:
        super().__init__(script, report)
        self.script, self.report = script, report

    def __str__(self) -> str:
        return f"{self.script} failed\n{self.report}"


class LaunchError(PiperError):
    """A process that `piper.launch` started has failed. Names its device, and the user's lines."""


MET = "met on device"
ECHO = f"{MET} 0, which captures and compiles for all"


def first_line(error: BaseException) -> str:
    """
    >>> first_line(ValueError("no value\\nat all")), first_line(ValueError())
    ('no value', '')
    """
    return next(iter(str(error).strip().splitlines()), "")


def is_echo(error: BaseException) -> bool:
    """Whether another device raised it first, and knows the line of the user's code."""
    return any(note.startswith(MET) for note in getattr(error, "__notes__", ()))


NO_MEMORY = ("can't allocate memory", "not enough memory")  # as torch says it of a CPU


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a GPU has no memory left. torch has an error of its own for a GPU.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("not enough memory"))
    (True, False)
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


class PeerLost(RunError):
    """A device that cannot continue because another one is gone: a symptom, not the cause.

    `culprit` is the device that it waited for, if that is known.
    """

    def __init__(
        self, device: int, instruction: str, reason: str, culprit: int | None = None
    ) -> None:
        super().__init__(device, instruction, reason)
        self.args = (device, instruction, reason, culprit)
        self.culprit = culprit

    def __str__(self) -> str:
        if self.culprit is None:
            return super().__str__()
        at = " ".join(self.instruction.split())
        first = f"device {self.device} waited in vain for device {self.culprit}, at {at}"
        return f"{first}\n  {self.reason}"
