"""How collectives pack a bundle of tensors into flat messages, and shard them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper.ir.values import ITEM_BYTES, TensorSpec


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors of one dtype, concatenated and padded so that all shards have the same length."""

    dtype: str
    tensors: tuple[int, ...]  # positions in the bundle
    numel: int
    padded: int  # `numel`, rounded up to a multiple of the number of shards

    @property
    def nbytes(self) -> int:
        return self.padded * ITEM_BYTES[self.dtype]


def messages(specs: Sequence[TensorSpec], limit: int, ways: int) -> tuple[Message, ...]:
    """Pack tensors into messages of at most `limit` bytes. A larger tensor gets its own message.

    >>> [m.tensors for m in messages([TensorSpec((2,)), TensorSpec((3,)), TensorSpec((9,))], 20, 2)]
    [(0, 1), (2,)]
    """
    done: list[Message] = []
    filling: dict[str, list[int]] = {}

    def close(dtype: str) -> None:
        chosen = filling.pop(dtype)
        numel = sum(specs[k].numel for k in chosen)
        done.append(Message(dtype, tuple(chosen), numel, -(-numel // ways) * ways))

    for k, spec in enumerate(specs):
        held = sum(specs[j].nbytes for j in filling.get(spec.dtype, ()))
        if held and held + spec.nbytes > limit:
            close(spec.dtype)
        filling.setdefault(spec.dtype, []).append(k)
    for dtype in list(filling):
        close(dtype)
    return tuple(done)


def in_type(layout: Sequence[Message], dtype: str | None) -> tuple[Message, ...]:
    """The same tensors in the same messages, in another floating-point type (None: their own).

    >>> [(m.dtype, m.padded) for m in in_type(messages([TensorSpec((3,))], 20, 2), "float64")]
    [('float64', 4)]
    """
    return tuple(
        replace(one, dtype=TensorSpec((), one.dtype).in_type(dtype).dtype) for one in layout
    )


def shard_specs(layout: Sequence[Message], ways: int) -> tuple[TensorSpec, ...]:
    """The flat shard of each message that one of `ways` devices keeps."""
    return tuple(TensorSpec((message.padded // ways,), message.dtype) for message in layout)
