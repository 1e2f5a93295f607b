"""Check that all processes have the same job, initial parameters, calls and batches."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from piper.errors import InputError, Problem, StrategyError
from piper.job.processes.different_lengths import BatchForm, Lengths, together
from piper.names import amount
from piper.runtime.processes.gathering import everyone
from piper.runtime.processes.waits import peers_needed
from piper.runtime.state.checksums import bits, checksums

SAMPLE = 1024  # elements of a large tensor that are compared where that happens often
WHOLE = 2**20  # bytes of a tensor that are all compared
SHORT = 60  # characters that a message can show; a digest is longer
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # differs between processes
Digests = dict[str, str]
Rows = tuple[int, str] | None
DeviceTimes = tuple[float, float, int]  # seconds of the last step, and after it; the role
SAME_SHAPES = (
    "give every process batches of the same shape in the same step: pad rows to a fixed length "
    '(padding="max_length"), not to the longest row of each batch, and leave out a smaller last '
    "batch (drop_last=True)"
)
SAME_ROWS = (
    "load data by trainer.replica: processes of one replica have the same batch; and leave out a "
    "smaller last batch (drop_last=True), or, if replicas always have different numbers of rows, "
    "give the strategy replica_sizes=, such as "
)
NO_MORE_BATCHES = "the end of evaluate"  # before that, each of its batches is like a step
OF_FIRST = "of the first replica, with replica_sizes="  # in the kind of a step
NO_TIMES: DeviceTimes = (0.0, 0.0, 0)


def refuse_disagreement(given: Mapping[str, str], model: torch.nn.Module) -> None:
    """Compare the arguments and initial parameters of every process with those of the first."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    texts = {name: ADDRESS.sub("", text) for name, text in given.items()}
    mine = {name: short_or_digest(text) for name, text in texts.items()}
    everywhere = everyone((mine, whole_digests(model)), "the comparison of models and options")
    wanted, weights = everywhere[0]
    for rank, (theirs, values) in enumerate(everywhere):
        for name in {**wanted, **theirs}:
            first, other = wanted.get(name, "nothing"), theirs.get(name, "nothing")
            if first != other:
                raise different_argument(rank, name, first, other)
        for name, found in weights.items():
            if values.get(name) != found:
                raise different_values(rank, name)


def structure(model: torch.nn.Module) -> str:
    """Modules and parameters by name, class, options of torch's layers, and shape."""
    modules = [f"{name} {words_of(module)}" for name, module in model.named_modules()]
    named = [*model.named_parameters(), *model.named_buffers()]
    return "\n".join([*modules, *(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in named)])


def words_of(module: torch.nn.Module) -> str:
    """The class of a module, and what a layer of torch prints, such as the share of a dropout.

    Containers print devices, which differ between processes.
    """
    kind = type(module)
    own = getattr(torch.nn, kind.__name__, None) is kind and not isinstance(module, CONTAINERS)
    return f"{kind.__qualname__}({module.extra_repr() if own else ''})"


CONTAINERS = (torch.nn.ParameterList, torch.nn.ParameterDict)
DEFAULT_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def flags(model: torch.nn.Module) -> tuple[bool, ...]:
    """Flags that a user may change between steps, and that a captured step depends on."""
    return (
        *(module.training for module in model.modules()),
        *(parameter.requires_grad for parameter in model.parameters()),
        *(torch.get_default_dtype() is one for one in DEFAULT_TYPES),
    )


def digests(model: torch.nn.Module) -> Digests:
    """To see whether values have changed in this process. Of large tensors, some elements."""
    return {name: tensor_digest(tensor) for name, tensor in filled(model).items()}


def whole_digests(model: torch.nn.Module) -> Digests:
    """Of all bits: where rows were added to a table of tokens, only these may differ."""
    found = filled(model)
    numbers = zip(found.items(), checksums(list(found.values())), strict=True)
    return {name: f"{tuple(one.shape)} {one.dtype} {number}" for (name, one), number in numbers}


def filled(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in named if has_values(tensor)}


def has_values(tensor: torch.Tensor) -> bool:
    """Whether it has memory: it is not on meta, and its storage was not released."""
    return not tensor.is_meta and tensor.numel() > 0 and tensor.untyped_storage().nbytes() > 0


def tensor_digest(tensor: torch.Tensor) -> str:
    given = tensor.detach()
    found = (given if given.nbytes <= WHOLE else spread(given)).cpu()
    real = torch.view_as_real(found) if found.is_complex() else found
    return f"{tuple(tensor.shape)} {tensor.dtype} {bits(real)}"


def fingerprint(batch: Iterable[torch.Tensor]) -> int:
    """A checksum of small tensors, and of some elements of large ones, in every step.

    Types and shapes are compared separately.
    """
    found = 0
    for tensor in batch:
        given = tensor.detach()
        found = bits((given if given.nbytes <= WHOLE else spread(given)).cpu(), found)
    return found


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Evenly spaced elements of a tensor, without a copy of the whole."""
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


def different_argument(rank: int, name: str, first: str, other: str) -> Exception:
    kind = StrategyError if name == "strategy" else InputError
    text = f": {other}, not {first}" if max(len(first), len(other)) < SHORT else ""
    return kind(
        name,
        Problem(
            f"device {rank} was given a different one than device 0{text}",
            "let every process build the same model, strategy and example, with the same options",
        ),
    )


def different_values(rank: int, name: str) -> Exception:
    return InputError.of(
        "model",
        f"{name} starts with different values on device {rank} than on device 0",
        "call torch.manual_seed(...) before the model is built, or load a checkpoint",
    )


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all processes know before a step."""

    weight: float  # of the batches of all replicas
    lost: bool = False  # some process has lost a checkpoint that was being written
    state: int = 0  # of what the model of the first process keeps in Python
    stop: bool = False  # some process was asked to stop after this step
    own: DeviceTimes = NO_TIMES  # of this process
    devices: tuple[DeviceTimes, ...] = ()  # of all
    lengths: Lengths | None = None  # of the batches of all replicas, if they differ
    twins: tuple[int, int] | None = None  # two replicas with the same data


def agree_on_step(
    kind: tuple[object, ...], batch: Sequence[torch.Tensor], feed: int, feeds: int, mine: Agreed,
    form: BatchForm | None = None,
) -> Agreed:  # fmt: skip
    """One small all-reduce before each step. It checks that all processes take a step of the same
    kind, and returns what they have together.

    `kind` is what a program is compiled for, but for the state in Python: only the first process,
    which compiles, knows what matters of it. The processes of one replica must have the same data;
    `batch` is empty if reading it would wait for the GPU. Without `form`, all must have the same
    shapes.
    """
    row = torch.full((numbers(feeds),), float("-inf"), dtype=torch.float64)
    times, rank = 2 + 3 * feeds, dist.get_rank()
    row[times + 3 * rank : times + 3 * rank + 3] = torch.tensor(mine.own)
    row[2 + feed], row[-2], row[-3] = mine.weight, float(mine.lost), float(mine.stop)
    if rank == 0:
        row[-1] = mine.state
    if batch:
        seen = fingerprint(batch)
        row[2 + feeds + feed], row[2 + 2 * feeds + feed] = seen, -seen
    most, lengths = agreed(kind, row, form)
    data = most[2 + feeds : times].view(2, feeds)
    other = (data[0] != -data[1]) & data[0].isfinite()  # infinite: no data was compared
    if other.any():
        raise different_data(int(other.nonzero()[0]))
    weight, lost, state = float(most[2 : 2 + feeds].sum()), bool(most[-2]), int(most[-1])
    devices = tuple((s, t, int(role)) for s, t, role in most[times:-3].view(-1, 3).tolist())
    twins = same_data(data[0].tolist()) if rank == 0 else None  # one warning is enough
    return Agreed(weight, lost, state, bool(most[-3]), mine.own, devices, lengths, twins)


def same_data(seen: Sequence[float]) -> tuple[int, int] | None:
    """Two replicas with the same fingerprint, if there are any. Infinite: none was taken.

    >>> same_data([7.0, 5.0, 7.0]), same_data([7.0, 5.0]), same_data([float("-inf")] * 2)
    ((0, 2), None, None)
    """
    first = {one: feed for feed, one in reversed(list(enumerate(seen))) if math.isfinite(one)}
    pairs = ((first[one], feed) for feed, one in enumerate(seen) if one in first)
    return next(((one, other) for one, other in pairs if one != other), None)


def compared(batch: Sequence[torch.Tensor], known: bool) -> Sequence[torch.Tensor]:
    """Which tensors to compare. Reading them from a GPU waits for it: only the first of a kind."""
    return () if known and any(one.is_cuda for one in batch) else batch


def numbers(feeds: int) -> int:
    """How many all processes agree on."""
    return 5 + 3 * feeds + 3 * int(dist.get_world_size())


def agree_on_call(call: str, feeds: int) -> None:
    """Check that all processes are in the same call, not in a step or another call."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        agreed((call,), torch.zeros(numbers(feeds), dtype=torch.float64))


def agreed(
    kind: tuple[object, ...], mine: torch.Tensor, form: BatchForm | None = None
) -> tuple[torch.Tensor, Lengths | None]:
    """The maximum over processes of each number. The first two encode the kind of call."""
    most = mine.clone()
    most[0], most[1] = kind_number(kind), -kind_number(kind)
    with peers_needed(f"the start of {call_of(kind)}"):
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most, None if most[0] == -most[1] else different_lengths(kind, form)


@lru_cache(maxsize=256)
def kind_number(kind: tuple[object, ...]) -> int:
    """Cached, because a model may have very many flags."""
    return number(repr(kind))


def number(text: str) -> int:
    """As many bits of a digest as fit in a float64."""
    return int(digest([text.encode()])[:12], 16)


def different_lengths(kind: tuple[object, ...], form: BatchForm | None) -> Lengths:
    """If processes differ only in the lengths of their batches, these. Else it is refused."""
    mine = call_of(kind), short(kind), repr(kind), row_counts(kind), form
    found = everyone(mine, "the comparison of calls")
    forms = [one[-1] for one in found if one[-1] is not None]
    lengths = together(forms) if len(forms) == len(found) else None
    if lengths is None:
        raise different_steps([one[:4] for one in found])
    return lengths


def different_steps(found: Sequence[tuple[str, str, str, Rows]]) -> Exception:
    other = next(rank for rank, theirs in enumerate(found) if theirs != found[0])
    calls, shown = [found[other][0], found[0][0]], [found[other][1], found[0][1]]
    if NO_MORE_BATCHES in calls and "step" in calls:
        fewer = other if calls[0] == NO_MORE_BATCHES else 0
        what = f"device {fewer} gave fewer batches than device {other - fewer}"
        return InputError.of("evaluate", what, "give every process the same number of batches")
    if calls[0] != calls[1]:
        return InputError.of(
            "trainer",
            f"device {other} is in trainer.{calls[0]}(...), device 0 in {calls[1]}(...)",
            "let every process call both, in the same order: no `if trainer.rank == 0:` around "
            "them",
        )
    there, here = shown
    if here != there and OF_FIRST in found[0][2]:
        what = f"the first replica would have {there} by the batch of device {other}, and {here}"
        fix = "give every process as many times the rows that replica_sizes says as device 0"
        return InputError.of("batch", f"{what} by that of device 0", fix)
    if here == there:
        what = f"device {other} has a model in a different mode than device 0"
        fix = "switch train(), eval() and requires_grad in all processes"
        return InputError.of("batch", what, fix)
    rows, first = found[other][3], found[0][3]
    if rows and first and rows[1:] == first[1:]:
        what = f"device {other} has a batch of {amount(rows[0], 'row')}, and device 0 one of "
        return InputError.of("batch", f"{what}{first[0]}", f"{SAME_ROWS}{[first[0], rows[0]]}")
    what = f"device {other} has a batch of different shapes than device 0: {there}, not {here}"
    return InputError.of("batch", what, SAME_SHAPES)


def call_of(kind: object) -> str:
    """The name of a call. The kind of a step is its shapes and flags."""
    return str(kind[0]) if isinstance(kind, tuple) and len(kind) == 1 else "step"


def different_data(replica: int) -> Exception:
    return InputError.of(
        "batch",
        f"the processes of replica {replica} were given different batches",
        "load the data by trainer.replica of trainer.replicas, not by rank, and seed what draws "
        "or shuffles it alike in all processes",
    )


def short(kind: object) -> str:
    """
    >>> short(((((8, 6), torch.float32), ((8,), torch.int64), "TreeSpec(...)"), (True, True)))
    '[8, 6] and [8]'
    """
    leaves = kind[0][:-1] if isinstance(kind, tuple) and isinstance(kind[0], tuple) else ()
    shapes = (str(list(leaf[0])) if isinstance(leaf, tuple) else str(leaf) for leaf in leaves)
    return " and ".join(dict.fromkeys(shapes))[:80]


def row_counts(kind: object) -> Rows:
    """The rows of a batch, and all else of its shapes. None: its tensors have different ones.

    >>> row_counts(((((8, 6), "float32"), ((8,), "int64"), "TreeSpec(...)"), (True, True)))
    (8, "(((6,), 'float32'), ((), 'int64'), 'TreeSpec(...)')")
    """
    leaves = kind[0] if isinstance(kind, tuple) and isinstance(kind[0], tuple) else ()
    rows = {leaf[0][0] for leaf in leaves if isinstance(leaf, tuple) and leaf[0]}
    if len(rows) != 1:
        return None
    rest = tuple((leaf[0][1:], leaf[1]) if isinstance(leaf, tuple) else leaf for leaf in leaves)
    return rows.pop(), repr(rest)


def refuse_over(closed: bool, broken: bool) -> None:
    """After a failed step, its messages could be mistaken for those of the next one."""
    again = "make a new Trainer"
    if closed:
        raise InputError.of("trainer", "it is closed", again)
    if broken:
        raise InputError.of("trainer", "a step failed, and its messages are still in flight", again)
