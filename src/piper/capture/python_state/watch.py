"""Watches Python state from step to step: what a training loop changes is compiled anew."""

import hashlib
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import is_, itemgetter
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

from piper.capture.outside.environment import Outside
from piper.capture.python_state.description import text_of
from piper.capture.python_state.device_contents import DeviceContents
from piper.capture.python_state.leaves import SIMPLE, is_opaque, token
from piper.capture.python_state.library import replaceable
from piper.capture.python_state.loss_state import reach_with_others, tensors_of
from piper.capture.python_state.places import Place, below, children, get, is_leaf
from piper.capture.python_state.reach import Reach
from piper.capture.python_state.settings import settings
from piper.capture.python_state.snapshot import Snapshot
from piper.capture.python_state.weak_references import weakly_held
from piper.capture.torch_private import memory_of, own_modules
from piper.errors import InputError

LOG = logging.getLogger("piper")
WEAK = (
    "%s refers weakly to what the forward reads: Piper keeps the object alive, so the forward "
    "never finds that it is gone; hold it in an attribute, and set that to None"
)
WARNED, MOST = 4, 64  # different states, each with its own program

MODE = "training"  # of modules: a kind of batch has it already

_FIXED = (*SIMPLE, type, FunctionType, BuiltinFunctionType, ModuleType)  # and replaced as a whole

State = int  # 0: as at the first capture; another number for each other state


class Watch:
    """The state of a model and its loss function. Cheap to ask if nothing has changed."""

    def __init__(self, model: nn.Module, loss_fn: Any, outside: Outside | None = None) -> None:
        self.given = model, loss_fn
        self.reach = reach_with_others(*self.given)
        self.first = Snapshot(self.reach)
        for path in [*weakly_held(self.first, self.reach)][:1]:
            LOG.warning(WEAK, path)
        self.state: State = 0
        self.known: set[State] = {0}
        self.library = replaceable(model, self.reach)
        self.settings = settings(self.reach, self.first.values())
        self.opaque: list[Any] = []  # objects of which only the identity is known
        self.outside = outside or Outside()
        self.distant = DeviceContents(())  # of tensors that a step does not wait for
        self.look(self.first)

    def look(self, now: Snapshot) -> None:
        """Remember what each container holds, by identity."""
        self.before = self.elsewhere()
        self.tensors = [vars(one) for _, one in tensors_of(*self.given, self.reach)]
        self.attributes = [*map(len, self.tensors)]
        self.roots = [(root.container, root.key, value) for root, value in now.roots]
        self.held = [
            held
            for place, _ in now.holders
            if self.reach.reads(place.names) and (held := held_by(place, self.reach)) is not None
        ]
        self.leaves = [
            (place.value, now.tokens[key])
            for key, place in now.places.items()
            if is_leaf(place.value)
            and type(place.value) not in _FIXED
            and self.reach.reads(place.names)
        ]
        self.settle()
        self.distant = DeviceContents(distant_tensors(now, self.reach))

    def settle(self) -> None:
        """Wait for answers about tensors on a GPU. An error if one of them was overwritten."""
        self.distant.refuse_written(wait=True)

    def now(self) -> State:
        """A number for the present state."""
        self.distant.refuse_written()
        if not self.is_as_before():
            self.reach = reach_with_others(*self.given)  # a new function may read other globals
            current = Snapshot(self.reach)
            self.look(current)
            self.state = self.number(current)
        self.distant.ask()
        return self.state

    def is_as_before(self) -> bool:
        return (
            all(get(container, key) is value for container, key, value in self.roots)
            and all(one.is_as_before() for one in self.held)
            and all(token(leaf) == before for leaf, before in self.leaves)
            and [*map(len, self.tensors)] == self.attributes
            and self.elsewhere() == self.before
        )

    def elsewhere(self) -> list[tuple[str, str]]:
        """What differs from the first capture in libraries, and outside of the program."""
        replaced = (one for one in self.library if not one.is_as_before())
        found = [each for one in replaced for each in one.changes()]
        found += [each for one in self.settings for each in one.changes()]
        return [*found, *self.outside.changes()]

    def number(self, current: Snapshot) -> State:
        """The same number for the same state, in every process."""
        changed = dict(self.changes(current))
        if not changed:
            return 0
        number = int(hashlib.sha256(repr(sorted(changed.items())).encode()).hexdigest()[:12], 16)
        if number not in self.known:
            self.known.add(number)
            self.report(", ".join(list(changed)[:3]))
        return number

    def changes(self, current: Snapshot) -> Iterator[tuple[str, str]]:
        """What differs from the first state, by path, as text."""
        for change in self.first.changes(current):
            if not self.is_a_mode(change.place) and self.reach.reads(change.place.names):
                after = change.after
                yield change.place.path, "absent" if after is None else text_of(after.value)
        for place in self.first.reordered(current):
            yield place.path, repr([token(key) for key in place.value])
        for before, now in self.first.same_tokens(current):
            other = before.value is not now.value and is_leaf(now.value)
            if other and is_opaque(now.value):
                yield now.path, self.named(now.value)
        yield from self.elsewhere()

    def is_a_mode(self, place: Place) -> bool:
        """Whether it says if a module of the model is in training: that is known otherwise."""
        model = self.given[0]
        return place.key == MODE and any(one is place.container for one in model.modules())

    def named(self, value: Any) -> str:
        """An object of which nothing can be compared: a number for each."""
        if not any(one is value for one in self.opaque):
            self.opaque.append(value)
        number = next(at for at, one in enumerate(self.opaque) if one is value)
        return f"{type(value).__qualname__} {number}"

    def report(self, changed: str) -> None:
        LOG.info("%s changed: the model is captured anew", changed)
        if len(self.known) == WARNED:
            LOG.warning(
                "%s changed %d times, and each time the model is compiled anew; pass it to the "
                "model with the batch, as a tensor", changed, WARNED - 1,
            )  # fmt: skip
        if len(self.known) > MOST:
            raise InputError.of(
                "model",
                f"{changed} changed {MOST} times, and each time the model was compiled anew",
                "pass it to the model with the batch, as a tensor: torch.tensor(...) without "
                "dimensions is the same for all rows",
            )


def distant_tensors(now: Snapshot, reach: Reach) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the code reads, with memory that only a GPU reads at once."""
    for place in now.places.values():
        if isinstance(place.value, Tensor) and reach.reads(place.names):
            start, readable = memory_of(place.value)
            if start and not readable:
                yield place.path, place.value


@dataclass(slots=True)
class Held:
    """What a container holds: values that are compared by identity, and how many there are."""

    size: Callable[[], int]
    values: Callable[[], Iterable[Any]]
    length: int
    before: tuple[Any, ...]

    def is_as_before(self) -> bool:
        return self.size() == self.length and all(map(is_, self.values(), self.before))


def held_by(place: Place, reach: Reach) -> Held | None:
    """What of a container matters. None: it cannot change."""
    holder = place.value
    match holder:
        case list() | deque():
            return _held(partial(len, holder), holder.__iter__)
        case FunctionType():
            return _held(lambda: len(_of_function(holder)), partial(_of_function, holder))
        case CellType():
            return _held(lambda: 1, lambda: (get(holder, "cell_contents"),))
        case OrderedDict():
            return _held(partial(len, holder), partial(OrderedDict.values, holder))
        case defaultdict():
            return _held(
                partial(len, holder), lambda: (*dict.values(holder), holder.default_factory)
            )
        case dict():
            return _held(partial(len, holder), partial(dict.values, holder))
        case nn.Module():
            children_ = _held(partial(len, own_modules(holder)), own_modules(holder).values)
            fields = _of_fields(vars(holder), place, reach)
            return _held(
                lambda: children_.size() + fields.size(),
                lambda: (type(holder), *children_.values(), *fields.values()),
            )
        case type():
            return _held(lambda: len(vars(holder)), lambda: vars(holder).values())
        case _ if hasattr(holder, "__dict__"):
            fields = _of_fields(vars(holder), place, reach)
            return _held(fields.size, lambda: (type(holder), *fields.values()))
        case tuple() | MethodType() | partial():
            return None
    return _held(lambda: len(children(holder)), lambda: [value for _, value in children(holder)])


def _held(size: Callable[[], int], values: Callable[[], Iterable[Any]]) -> Held:
    return Held(size, values, size(), tuple(values()))


def _of_function(function: FunctionType) -> tuple[Any, ...]:
    """What somebody may replace in it. Its closure has cells, which are looked at by themselves."""
    named = function.__kwdefaults__ or {}
    own = vars(function)
    return function.__code__, *(function.__defaults__ or ()), *named.values(), *own.values()


def _of_fields(fields: dict[str, Any], place: Place, reach: Reach) -> Held:
    """The attributes that some code reads."""
    keys = [key for key in fields if reach.reads(below(place, key, None).names)]
    if not keys:
        return _held(partial(len, fields), tuple)
    pick = itemgetter(*keys) if len(keys) > 1 else lambda all: (all[keys[0]],)

    def values() -> Iterable[Any]:
        try:
            return cast(tuple[Any, ...], pick(fields))
        except KeyError:  # it was deleted
            return ()

    return _held(partial(len, fields), values)
