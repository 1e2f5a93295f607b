"""`annotate`: which part of a model's forward pass belongs to which region."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from torch.fx import traceback

from piper.errors import CaptureError

KEY = "piper"  # the key of tags in a node's `meta["custom"]`


@dataclass(frozen=True, slots=True)
class Mark:
    """One `with annotate(...)` as it was entered. Its number is set once the graph is known."""

    name: str
    index: int | None  # what the user wrote
    entry: int  # the number of this with-block, which distinguishes blocks of one name

    @property
    def identity(self) -> tuple[str, int | None, int]:
        """Equal for marks of one region: the same explicit index, or the same entry."""
        return (self.name, self.index, self.entry if self.index is None else -1)


Path = tuple[Mark, ...]


@dataclass
class Recording:
    """The marks that are open while a model is traced, and how many there were of which names."""

    entries: int = 0
    names: set[str] = field(default_factory=set)
    open: list[Mark] = field(default_factory=list)


_recording: Recording | None = None


def annotate(
    name: str = "", index: int | None = None, **other: int
) -> AbstractContextManager[None]:
    """Make what runs inside one region: `with annotate("PP"): ...`.

    Every block gets the next number of its name, in the order of the captured graph. Blocks with
    the same explicit `index` are one region. Blocks nest. Does nothing outside `capture`.
    """
    if not isinstance(name, str) or not name.isidentifier() or other:
        raise wrong_name(name, other)
    if index is not None and type(index) is not int:
        fix = f'write annotate("{name}"), which gets the next number, or annotate("{name}", 0)'
        raise CaptureError.of(f"annotate({name!r}, {index!r})", "its index is not a number", fix)
    if _recording is None:
        return nullcontext()
    return _marked(_recording, name, index)


def wrong_name(name: object, other: dict[str, int]) -> CaptureError:
    """As filters are written: `annotate(PP=0)`, `annotate("PP=0")`."""
    parts = tuple(name.split("=")) if isinstance(name, str) else ()
    said = [*other.items(), parts, ("PP", 0)]
    key, index = next(one for one in said if len(one) == 2)
    wrote = ", ".join([repr(name)] * bool(name) + [f"{k}={v}" for k, v in other.items()])
    fix = f'write annotate("{key}"), which gets the next number, or annotate("{key}", {index})'
    return CaptureError.of(f"annotate({wrote})", "it takes a name, and then a number", fix)


@contextmanager
def recording() -> Iterator[None]:
    """While this is open, `annotate` marks the graph's nodes.

    A trace that fails may leave marks of its own open, which would be on all nodes of the next one.
    """
    global _recording
    previous, _recording = _recording, Recording()
    outside = traceback.current_meta.pop("custom", None)
    try:
        yield
    finally:
        _recording = previous
        traceback.current_meta.pop("custom", None)
        if outside is not None:
            traceback.current_meta["custom"] = outside


def recorded_names() -> frozenset[str]:
    """The names of the blocks that were entered since the recording began."""
    return frozenset() if _recording is None else frozenset(_recording.names)


@contextmanager
def _marked(state: Recording, name: str, index: int | None) -> Iterator[None]:
    if any(mark.name == name for mark in state.open):
        raise CaptureError.of(
            f'annotate("{name}")',
            f"a {name} region is inside another {name} region",
            "use another name for the inner one, or end the outer one first",
        )
    state.open.append(Mark(name, index, state.entries))
    state.entries += 1
    state.names.add(name)
    try:
        with traceback.annotate({KEY: tuple(state.open)}):
            yield
    finally:
        state.open.pop()
