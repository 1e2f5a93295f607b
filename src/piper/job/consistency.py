"""All processes must be given the same job and the same first parameters, or nothing is exact."""

from __future__ import annotations

import ctypes
import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist

from piper.errors import InputError, PeerLost, Problem, StrategyError

SAMPLE = 1024  # elements of each parameter that are compared: enough to tell two random ones apart
SHORT = 60  # characters that a message can show; a digest is longer
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # no two processes have the same
Digests = dict[str, str]


def refuse_disagreement(given: Mapping[str, str], model: torch.nn.Module) -> None:
    """Compare with the first process what every process was given, and its first parameters."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    texts = {name: ADDRESS.sub("", text) for name, text in given.items()}
    mine = {name: short_or_digest(text) for name, text in texts.items()}
    everyone: list[tuple[Digests, Digests]] = [({}, {})] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, digests(model)))
    wanted, weights = everyone[0]
    for rank, (theirs, values) in enumerate(everyone):
        for name, found in wanted.items():
            if theirs[name] != found:
                raise given_otherwise(rank, name, found, theirs[name])
        for name, found in weights.items():
            if values.get(name) != found:
                raise other_values(rank, name)


def structure(model: torch.nn.Module) -> str:
    """Modules and parameters by name, class and shape."""
    modules = [f"{name} {type(module).__qualname__}" for name, module in model.named_modules()]
    named = [*model.named_parameters(), *model.named_buffers()]
    return "\n".join([*modules, *(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in named)])


def flags(model: torch.nn.Module) -> tuple[bool, ...]:
    """What a user may switch between steps, and a captured step would not notice."""
    return (
        *(module.training for module in model.modules()),
        *(parameter.requires_grad for parameter in model.parameters()),
    )


def digests(model: torch.nn.Module) -> Digests:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: digest([sample(tensor)]) for name, tensor in named if has_values(tensor)}


def has_values(tensor: torch.Tensor) -> bool:
    """Not on meta; nor was its memory given back, which a Trainer does not need any more."""
    return not tensor.is_meta and tensor.numel() > 0 and tensor.untyped_storage().nbytes() > 0


def sample(tensor: torch.Tensor) -> bytes:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    some = spread(real).to("cpu", torch.float64).contiguous()
    text = f"{tuple(tensor.shape)}{tensor.dtype}".encode()
    return text + ctypes.string_at(some.data_ptr(), some.nbytes)


def fingerprint(batch: Iterable[torch.Tensor]) -> int:
    """A number that different data hardly share. Types and shapes are compared besides; it is
    taken in every step, so the bytes are taken as they are."""
    found = 0
    for tensor in batch:
        some = spread(tensor.detach()).cpu().contiguous()
        found = zlib.crc32(ctypes.string_at(some.data_ptr(), some.nbytes), found)
    return found


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its elements, from all over it; never a copy of the whole."""
    step = max(1, tensor.numel() // SAMPLE)
    if tensor.is_contiguous():
        return tensor.flatten()[::step]
    where = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(where, tensor.shape)]


def short_or_digest(text: str) -> str:
    return text if len(text) < SHORT else digest([text.encode()])


def digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def given_otherwise(rank: int, name: str, first: str, other: str) -> Exception:
    kind = StrategyError if name == "strategy" else InputError
    text = f": {other}, not {first}" if max(len(first), len(other)) < SHORT else ""
    return kind(
        name,
        Problem(
            f"device {rank} was given another one than device 0{text}",
            "let every process build the same model, strategy and example, with the same options",
        ),
    )


def other_values(rank: int, name: str) -> Exception:
    return InputError(
        "model",
        Problem(
            f"{name} starts with other values on device {rank} than on device 0",
            "call torch.manual_seed(...) before the model is built, or load a checkpoint",
        ),
    )


def refuse_too_late(taken: Digests, model: torch.nn.Module) -> None:
    """A Trainer copies a model's values when it is made: what is loaded after that is not seen."""
    changed = [
        name
        for name, one in model.named_parameters()
        if name in taken and has_values(one) and digest([sample(one)]) != taken[name]
    ]
    if changed:
        raise InputError(
            "model",
            Problem(
                f"{changed[0]} was changed after the Trainer was made, which has its own copy",
                "load the weights before you make the Trainer, or use trainer.resume(...)",
            ),
        )


def agree_on_step(
    kind: tuple[object, ...],
    batch: Sequence[torch.Tensor],
    feed: int,
    feeds: int,
    own: float,
) -> float:
    """One small message before each step: that all processes take a step of the same kind, and
    what the batches of all replicas weigh together.

    `kind` is what a program is compiled for. Processes of one replica must have been given the
    same data; `batch` is empty where they cannot be looked at.
    """
    mine = torch.full((2 + 3 * feeds,), float("-inf"), dtype=torch.float64)
    mine[2 + feed] = own
    if batch:
        seen = fingerprint(batch)
        mine[2 + feeds + feed], mine[2 + 2 * feeds + feed] = seen, -seen
    most = met(kind, mine)
    data = most[2 + feeds :].view(2, feeds)
    other = (data[0] != -data[1]) & data[0].isfinite()  # infinite: nobody gave any
    if other.any():
        raise different_data(int(other.nonzero()[0]))
    return float(most[2 : 2 + feeds].sum())


def agree_on_call(call: str, feeds: int) -> None:
    """That all processes are in the same call: one that is not is in a step, or in another."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        met((call,), torch.zeros(2 + 3 * feeds, dtype=torch.float64))


def met(kind: tuple[object, ...], mine: torch.Tensor) -> torch.Tensor:
    """The most that any process has, of each number; the first two tell what they are doing."""
    most = mine.clone()
    most[0], most[1] = kind_number(kind), -kind_number(kind)
    try:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    except RuntimeError as error:  # between two steps, too, a lost peer is only a symptom
        raise PeerLost(dist.get_rank(), f"the start of {call_of(kind)}", str(error)) from error
    if most[0] != -most[1]:
        raise different_steps(kind)
    return most


@cache
def kind_number(kind: tuple[object, ...]) -> int:
    """Made once for each kind of step: a model may have very many flags."""
    return number(repr(kind))


def number(text: str) -> int:
    """As many bits of a digest as a float64 holds."""
    return int(digest([text.encode()])[:12], 16)


def different_steps(kind: tuple[object, ...]) -> Exception:
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, kind)
    other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    calls = [call_of(kind) for kind in (everyone[other], everyone[0])]
    if calls[0] != calls[1]:
        return InputError(
            "trainer",
            Problem(
                f"process {other} is in trainer.{calls[0]}(...), process 0 in {calls[1]}(...)",
                "let every process call both, in the same order: no `if trainer.rank == 0:` around",
            ),
        )
    here, there = short(everyone[0]), short(everyone[other])
    apart = "a model in another mode" if here == there else "a batch of other shapes"
    shapes = "" if here == there else f": {there}, not {here}"
    return InputError(
        "batch",
        Problem(
            f"process {other} has {apart} than process 0{shapes}",
            "give every process batches of the same shape in the same step (drop_last=True), and "
            "switch train(), eval() and requires_grad in all of them",
        ),
    )


def call_of(kind: object) -> str:
    """A step's kind is its shapes and flags, that of another call its name."""
    return str(kind[0]) if isinstance(kind, tuple) and len(kind) == 1 else "step"


def different_data(replica: int) -> Exception:
    return InputError(
        "batch",
        Problem(
            f"the processes of replica {replica} were given different batches",
            "load the data by trainer.replica of trainer.replicas, not by rank",
        ),
    )


def short(kind: object) -> str:
    """
    >>> short(((((8, 6), torch.float32), ((8,), torch.int64), "TreeSpec(...)"), (True, True)))
    '[8, 6] and [8]'
    """
    leaves = kind[0][:-1] if isinstance(kind, tuple) and isinstance(kind[0], tuple) else ()
    shapes = (str(list(leaf[0])) if isinstance(leaf, tuple) else str(leaf) for leaf in leaves)
    return " and ".join(shapes)[:80]


def refuse_over(closed: bool, broken: bool) -> None:
    """After a step that failed, what it sent could be taken for what the next one sends."""
    again = "make a new Trainer"
    if closed:
        raise InputError("trainer", Problem("it is closed", again))
    if broken:
        raise InputError("trainer", Problem("a step failed: its messages are under way", again))
