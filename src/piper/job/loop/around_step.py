"""What a training loop does around its steps: modes of torch, and writes to the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from piper.capture import Captured
from piper.capture.torch_private import has_global_hooks, has_hooks, own_tensors, version_of
from piper.capture.trace.side_effects import refuse_hooks
from piper.errors import InputError
from piper.job.processes.consistency import Digests, digests, tensor_digest
from piper.runtime.processes.broadcast_text import broadcast_text
from piper.runtime.processes.world import world

LOG = logging.getLogger("piper")
FIRST, EVERY = 3, 100  # steps before which all values are compared: the first, and every so many


def refuse_modes() -> None:
    """Modes that would change how the compiled program computes."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if kinds:
        raise InputError.of(
            "autocast",
            f'torch.autocast("{kinds[0]}") is on around a call of the Trainer: it would change '
            "the compiled program, also its backward",
            'leave it out, and give the Trainer precision="bf16"; or use autocast in the forward '
            "of the model",
        )
    if torch.is_inference_mode_enabled():
        raise InputError.of(
            "inference_mode", "it is on around a call of the Trainer", "leave it out"
        )


class ModelWrites:
    """Sees writes to parameters and buffers of the user's model after the Trainer has copied it.

    Values that came from `trainer.state_dict()` may be loaded, to evaluate. Older values, and those
    at the start, get a warning: somebody may believe that training goes on from them. Versions are
    compared before every step. They miss writes to `.data`, so values are compared from time to
    time.
    """

    def __init__(self, model: torch.nn.Module, taken: Digests) -> None:
        self.stepped = 0  # steps since the Trainer was made
        self.known: dict[str, set[str]] = {}  # digests that a tensor may have
        self.warned = False
        self.newest: tuple[int, Digests] = (-1, {})  # given last, and after which step
        self.allow(taken)
        self.look(model)

    def look(self, model: torch.nn.Module) -> None:
        self.modules = list(model.modules())
        self.held = self.tensors()
        self.versions = [*map(version, self.held)]

    def tensors(self) -> list[torch.Tensor | None]:
        return [tensor for module in self.modules for tensor in own_tensors(module)]

    def allow(self, found: Digests) -> None:
        for name, one in found.items():
            self.known.setdefault(name, set()).add(one)

    def allow_values(
        self, values: Mapping[str, torch.Tensor] | None, model: torch.nn.Module
    ) -> None:
        """Values that the Trainer has given to the first process, which may send them to others.

        They are compared in the types that they have in the model.
        """
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        known = {n: one for n, one in (values or {}).items() if isinstance(one, torch.Tensor)}
        pairs = ((name, own[name], one) for name, one in known.items() if name in own)
        real = ((name, like, one) for name, like, one in pairs if not one.is_meta)
        mine = {name: tensor_digest(one.to(like.dtype)) for name, like, one in real}
        given = from_first(mine)
        self.newest = self.stepped, given
        self.allow(given)

    def refuse(self, model: torch.nn.Module, captured: Iterable[Captured] = ()) -> None:
        """Refuse a write that training would not see."""
        now = self.tensors()
        owners = [*self.modules, *(one for one in now if one is not None)]
        if has_global_hooks() or any(map(has_hooks, owners)):
            refuse_hooks(model)
        same = len(now) == len(self.held) and all(map(same_tensor, now, self.held))
        if same and [*map(version, now)] == self.versions and not is_due(now, self.stepped):
            return
        found = digests(model)
        for name, one in found.items():
            if one not in self.known.get(name, ()):
                raise changed(name)
        self.warn(model, found, captured)
        self.look(model)

    def warn(self, model: torch.nn.Module, found: Digests, captured: Iterable[Captured]) -> None:
        """Of values that were written again, but are not those with which training goes on.

        A loop that resets a state which forwards carry from step to step is an error, unless it
        loads everything.
        """
        seen = {id(one): at for one, at in zip(self.held, self.versions, strict=True)}
        named = [*model.named_parameters(), *model.named_buffers()]
        written = [name for name, one in named if seen.get(id(one)) != version(one)]
        given, newest = self.newest
        old = [n for n in written if given != self.stepped or found.get(n) != newest.get(n)]
        carried = {name for one in captured for region in one.model.regions
                   for name in region.reads_state}  # fmt: skip
        is_loaded = {name for name, _ in model.named_parameters()}.issubset(written)
        if self.stepped and (again := sorted(carried & {*old})) and not is_loaded:
            raise reset(again[0])
        if self.stepped and old and not self.warned:
            self.warned = True
            names = old[0] if len(old) == 1 else f"{old[0]} and {len(old) - 1} more"
            LOG.warning(ignored_write(names))


def ignored_write(names: str) -> str:
    return (
        f"a write to {names} of the model, with values that it had before, is not seen: training "
        "goes on with its own. To start again from them, make a new Trainer or use "
        "trainer.resume(...); reset a state by an argument of the batch"
    )


def reset(name: str) -> InputError:
    return InputError.of(
        "model",
        f"{name} was set to values that it had before, and training goes on with its own",
        "reset a state by an argument of the batch: `state = torch.where(new, 0, state)` in the "
        "forward; or make a new Trainer, or use trainer.resume(...)",
    )


def from_first(mine: Digests) -> Digests:
    """What the first process has, in every process."""
    if world() == 1:
        return mine
    text = broadcast_text(json.dumps(mine) if dist.get_rank() == 0 else "")
    return {str(name): str(one) for name, one in json.loads(text).items()}


def version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else version_of(tensor)


def same_tensor(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other


def is_due(tensors: Iterable[torch.Tensor | None], stepped: int) -> bool:
    """Whether to compare all values. Reading them from a GPU waits for it, so that is rarer."""
    on_gpu = any(one is not None and one.is_cuda for one in tensors)
    return stepped % EVERY == 0 or (stepped <= FIRST and not on_gpu)


def changed(name: str) -> InputError:
    return InputError.of(
        "model",
        f"{name} was changed after the Trainer was made, which has its own copy",
        "load the weights before you make the Trainer, or use trainer.resume(...); pass what "
        "changes between steps with the batch, as a tensor",
    )
