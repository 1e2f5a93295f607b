"""What processes send each other comes back as it was, and runs no code, whoever sent it."""

from __future__ import annotations

import ast
import pickle
import random
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from draws import drawn, draws
from sources import FILES as SOURCES
from sources import nodes

from piper.runtime.checkpoint.description import Contents
from piper.runtime.checkpoint.index import Piece, StoredPiece
from piper.runtime.observe.recorder import Notes
from piper.runtime.processes.wire_format import from_bytes, to_bytes, travels
from piper.runtime.state.device_state import Part
from piper.runtime.state.element_order import ElementOrder

UNSAFE = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "pickle", "marshal", "shelve", "dill", "cloudpickle",
}  # fmt: skip
# `piper.launch` sends a function of the caller to processes of its own, in a private folder.
OWN_CHILDREN = {"call.py", "function.py"}


@pytest.mark.parametrize(
    "value",
    [
        None, True, -3, 2**80, 0.1, float("inf"), "a\nb\0\u2028", [], (), {}, set(), [[1], (2,)],
        {("w", "0:4"): 1, 2: None, "dict": {"tensor": "class"}}, {"a", "b"}, torch.bfloat16,
        Contents({"AdamW"}, {("lr", "0.1")}), Notes([1, 2], [3], [4], [True, False]),
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: object) -> None:
    found = from_bytes(to_bytes(value))

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)], ids=str)
def test_tensors_come_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    one = (torch.randn(shape) * 9).to(dtype)
    part = Part("w", 3, (9, 9), one, ElementOrder(1, 2, 3))

    (found, other), again = from_bytes(to_bytes(((part, one.mT if one.dim() > 1 else one), one)))

    assert (found.name, found.first, found.shape, found.order) == ("w", 3, (9, 9), part.order)
    assert found.values.dtype == dtype and torch.equal(found.values, one)
    assert torch.equal(other, one.mT if one.dim() > 1 else one) and torch.equal(again, one)


@pytest.mark.parametrize("value", [object(), print, 1j, b"x", threading.Lock, range(3)], ids=repr)
def test_what_does_not_travel_is_not_sent(value: object) -> None:
    with pytest.raises(TypeError, match="do not travel between processes"):
        to_bytes([value])


def test_a_name_is_one_class() -> None:
    with pytest.raises(AssertionError):
        travels(type("Part", (tuple,), {}))


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('a message ran code')",)


def hostile(text: str) -> torch.Tensor:
    content = len(text).to_bytes(8, "little") + text.encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.mark.parametrize(
    "message",
    [
        torch.frombuffer(bytearray(pickle.dumps(Bomb())), dtype=torch.uint8),
        torch.empty(0, dtype=torch.uint8),
        torch.full((8,), 255, dtype=torch.uint8),
        hostile('{"class": ["Popen", [["true"]]]}'),
        hostile('{"class": ["__import__", ["os"]]}'),
        hostile('{"dtype": "load"}'),
        hostile('{"tensor": ["float32", [1000000000000]]}'),
        hostile('{"tensor": ["float32", [-1, -1]]}'),
        hostile('{"tensor": ["hub", [1]]}'),
        hostile('{"call": []}'),
        hostile('{"class": ["Piece", []]}'),
        hostile('{"set": [[1]]}'),
        hostile("[" * 100_000),
    ],
    ids=range(13),
)
def test_a_message_of_a_stranger_runs_nothing(message: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="message|tensor|dtype|codec|Expecting|Extra|char"):
        from_bytes(message)


@drawn
def test_damaged_messages_are_values_or_errors() -> None:
    """Of any kind: a changed number is another number. The digests of checkpoints are for that."""
    draw = random.Random(0)
    stored = StoredPiece(Piece("w"), "float32", (4,), "file", 0, "digest")
    whole = to_bytes([{("w", 1): torch.randn(4)}, stored, Notes([1], [2], [3], [False])])
    for _ in range(draws(500, 20_000)):
        content = whole.clone()
        for _ in range(draw.randrange(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        end = draw.choice((len(content), draw.randrange(len(content))))
        with suppress(ValueError):
            from_bytes(content[:end])


def test_nobody_reads_pickles() -> None:
    """torch's own gathering of objects reads pickles, which run what they say."""
    for path in (path for path in SOURCES if any(map(path.read_text().__contains__, UNSAFE))):
        names = {name_of(node) for node in nodes(path)}
        is_launch = path.parent.name == "launcher" and path.name in OWN_CHILDREN

        assert is_launch or not names & UNSAFE, path


def name_of(node: ast.AST) -> str:
    match node:
        case ast.Attribute():
            return node.attr
        case ast.Name():
            return node.id
        case ast.ImportFrom() if {one.name for one in node.names} != {"dumps"}:
            return node.module or ""  # what is only written is compared, by its digest
        case ast.alias():
            return node.name
    return ""


def test_nobody_loads_with_torch() -> None:
    for path in (path for path in SOURCES if "load" in path.read_text()):
        calls = [node for node in nodes(path) if is_torch_load(node)]

        assert not calls, path


def is_torch_load(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(ast.Name("torch"), "load"):
            return True
    return False
