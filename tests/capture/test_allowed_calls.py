"""Text that became a graph runs nothing of its own, whatever was written into it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from piper.capture.kernels.allowed_calls import BY_NAME, function, name_of
from piper.capture.kernels.shipping import from_json, to_json
from piper.errors import CaptureError

Json = Any
Position = tuple[Json, int | str]  # a list or an object, and where in it


def choosing(x: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2.0])
    y = torch.nn.functional.gelu(x @ x, approximate="tanh") + table
    return torch.cond(y.sum() > 0, lambda z: z * 2, lambda z: z - 1, (y,)).sum(0, keepdim=True)


@pytest.fixture(scope="module")
def sent() -> str:
    return to_json(make_fx(choosing)(torch.ones(2, 2)), described=True)


def graph(*rows: Json, inside: Json = None) -> str:
    end = ["output", "output", "output", [{"tuple": [{"node": len(rows)}]}], {"dict": {}}]
    first = ["placeholder", "x", "x", [], {"dict": {}}]
    return json.dumps({"nodes": [first, *rows, end], "inside": inside or {}})


def call(target: str, *args: Json, **kwargs: Json) -> Json:
    return ["call_function", "y", target, list(args), {"dict": kwargs}]


def attacks(code: str, path: str) -> Iterator[tuple[str, str]]:
    """Ways to run code or to reach a file that fx would follow."""
    x = {"node": 0}
    yield "argument", graph(["placeholder", "y", f"y={code}", [], {"dict": {}}])
    yield "option", graph(call("torch.mm", x, x, **{f"out={code}, b": None}))
    yield "node", graph(["call_function", f"y\n {code}\n", "torch.neg", [x], {"dict": {}}])
    chain = [
        ["get_attr", "a", "__class__.__init__.__globals__", [], {"dict": {}}],
        ["call_function", "b", "operator.getitem", [{"node": 1}, "__builtins__"], {"dict": {}}],
        ["call_function", "c", "operator.getitem", [{"node": 2}, "eval"], {"dict": {}}],
        ["call_function", "d", "operator.call", [{"node": 3}, code], {"dict": {}}],
    ]
    yield "attribute", graph(*chain)
    yield (
        "attribute that is there",
        graph(*chain, inside={chain[0][2]: [[], [], "int8", "cpu", ""]}),
    )
    yield "method", graph(["call_method", "y", f"neg() + {code}", [x], {"dict": {}}])
    yield "module", graph(["call_module", "y", f"x.{code}", [x], {"dict": {}}])
    yield "output", graph(["output", "y", code, [x], {"dict": {}}])
    yield "unknown kind of node", graph([code, "y", "y", [x], {"dict": {}}])
    yield "function", graph(call("operator.call", x))
    yield "file that is made", graph(call("ops.aten.from_file.default", path, True, 4))
    yield "file that is written", graph(call("ops.aten.save.default", x, path))
    yield (
        "file that is read",
        graph(
            call("ops.debugprims.load_tensor.default", path, [1], [1], dtype={"dtype": "float32"})
        ),
    )
    yield "higher-order operator", graph(call("ops.higher_order.print.default", code))
    yield "dtype", graph(call("ops.aten.zeros.default", [1], dtype={"dtype": "load"}))
    yield "kind of value", graph(call("torch.neg", {"eval": code}))


@pytest.mark.parametrize("kind", [kind for kind, _ in attacks("", "")])
def test_code_in_the_text_of_a_graph_is_an_error(kind: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    text = dict(attacks(f"open({str(canary)!r}, 'w')", str(canary)))[kind]

    with pytest.raises(CaptureError):
        run(text)

    assert not canary.exists()


def run(text: str) -> None:
    """As a step would. A graph that makes no sense fails in some way of torch's."""
    found = from_json(text)
    with suppress(Exception):
        found(torch.ones(2, 2))


def positions(value: Json) -> Iterator[Position]:
    """Every place in a JSON value, and every key of its objects."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(children):
        yield value, key
        if isinstance(child, list | dict):
            yield from positions(child)


def mutated(text: str, code: str, path: str, draw: random.Random) -> str:
    """The same graph, with something hostile or senseless at a random place."""
    found = json.loads(text)
    where, key = draw.choice(list(positions(found)))
    hostile = [
        code, f"x={code}", f"a\n    {code}\n", "__class__", "self", path, -1, 1e999, None, [], {},
        {"node": 10**6}, {"node": -1}, {"tuple": 3}, {"device": code}, {"dtype": "load"},
        "ops.aten.from_file.default", "ops.aten.save.default", "operator.call", "get_attr",
        "call_module", "placeholder", "builtins.eval", True, {"dict": {code: 1}},
    ]  # fmt: skip
    if isinstance(where, dict) and draw.random() < 0.5:
        where[str(draw.choice(hostile))] = where.pop(key)
    else:
        where[key] = draw.choice(hostile)
    return json.dumps(found)


def attack_at_random(sent: str, folder: Path, rounds: int) -> int:
    """How many mutants of a graph were an error. Any other exception than Piper's own escapes."""
    draw, canary, told = random.Random(0), folder / "canary", 0
    code = f"open({str(canary)!r}, 'w')"
    for _ in range(rounds):
        try:
            run(mutated(sent, code, str(canary), draw))
        except CaptureError:
            told += 1
        assert not canary.exists()
    return told


def test_no_place_in_the_text_runs_code(sent: str, tmp_path: Path) -> None:
    assert attack_at_random(sent, tmp_path, 100) > 40


@pytest.mark.soak
def test_no_place_in_the_text_runs_code_in_two_thousand_attacks(sent: str, tmp_path: Path) -> None:
    assert attack_at_random(sent, tmp_path, 2000) > 800


def test_functions_come_back_by_name() -> None:
    assert {function(name_of(found)) for found in BY_NAME.values()} == set(BY_NAME.values())


def test_an_operator_of_the_user_may_take_text() -> None:
    @torch.library.custom_op("faulty::labelled", mutates_args=())
    def labelled(x: Tensor, label: str) -> Tensor:
        return x.clone()

    wanted = torch.ops.faulty.labelled.default
    graph = fx.Graph()
    graph.output((graph.call_function(wanted, (graph.placeholder("x"), "left")),))

    found = from_json(to_json(fx.GraphModule({}, graph)))

    assert found(torch.ones(2))[0].equal(torch.ones(2))


def test_a_damaged_graph_is_an_error() -> None:
    for text in ("", "[]", "{", '{"nodes": 1, "inside": {}}', '{"nodes": [[]], "inside": {}}'):
        with pytest.raises(CaptureError, match="a graph that came as text is damaged"):
            from_json(text)
