"""Bundles of integer tensors, and how messages pack and shard them.

Written from the meaning of the instructions, independently of the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from zlib import crc32

from piper.plan.instructions import Layout

PRIME = 2**61 - 1
Bundle = tuple[tuple[int, ...], ...]  # tensors, flat
Number = int | Bundle


class Wrong(Exception):
    """The plans deadlock, or read a buffer that is empty."""


@cache
def number(text: str) -> int:
    return crc32(text.encode())


def mix(*parts: object) -> int:
    """A hash of the parts, the same in every run."""
    return hash(tuple(map(plain, parts))) % PRIME


def blend(*numbers: int) -> int:
    """The same for integers only, and faster."""
    return hash(numbers) % PRIME


def plain(part: object) -> object:
    if isinstance(part, str):
        return number(part)
    return -7 if part is None else part


def elements(number: Number) -> Iterator[int]:
    if isinstance(number, int):
        yield number
    else:
        yield from (element for tensor in number for element in tensor)


def sizes(number: Number) -> list[int]:
    return [1] if isinstance(number, int) else [len(tensor) for tensor in number]


def added(*numbers: Number) -> Number:
    """The sum, element by element."""
    first = numbers[0]
    if any(sizes(each) != sizes(first) for each in numbers):
        raise Wrong("what is added has different shapes")
    if isinstance(first, int):
        return sum(numbers) % PRIME  # type: ignore[arg-type]
    columns = zip(*numbers, strict=True)  # type: ignore[arg-type]
    return tuple(
        tuple(sum(each) % PRIME for each in zip(*tensors, strict=True)) for tensors in columns
    )


def packed(bundle: Number, messages: Sequence[Layout]) -> Bundle:
    """One flat tensor per message. Every tensor of the bundle is in exactly one."""
    taken = sorted(k for _, tensors, _ in messages for k in tensors)
    if isinstance(bundle, int) or taken != list(range(len(bundle))):
        raise Wrong("the messages are of another bundle")
    return tuple(flat([bundle[k] for k in tensors], padded) for _, tensors, padded in messages)


def flat(tensors: Sequence[Sequence[int]], padded: int) -> tuple[int, ...]:
    joined = [element for tensor in tensors for element in tensor]
    if len(joined) > padded:
        raise Wrong("a message is too short")
    return (*joined, *[0] * (padded - len(joined)))


def unpacked(flats: Bundle, messages: Sequence[Layout], numels: Sequence[int]) -> Bundle:
    """The tensors of these sizes, unpacked from flat messages."""
    found: dict[int, tuple[int, ...]] = {}
    if len(flats) != len(messages):
        raise Wrong("there are other messages than expected")
    for whole, (_, tensors, _) in zip(flats, messages, strict=True):
        first = 0
        for k in tensors:
            found[k] = whole[first : first + numels[k]]
            first += numels[k]
        if first > len(whole):
            raise Wrong("a message is too short")
    return tuple(found[k] for k in sorted(found))


def shard(flats: Bundle, k: int, ways: int) -> Bundle:
    """The k-th shard of each message."""
    if any(len(whole) % ways for whole in flats):
        raise Wrong("a message cannot be cut in equal parts")
    return tuple(whole[k * len(whole) // ways : (k + 1) * len(whole) // ways] for whole in flats)


def joined(shards: Sequence[Bundle]) -> Bundle:
    """Whole messages, from all their shards."""
    if len(set(map(len, shards))) > 1:
        raise Wrong("the shards are of other messages")
    return tuple(
        tuple(element for part in parts for element in part) for parts in zip(*shards, strict=True)
    )
