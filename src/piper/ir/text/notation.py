"""Read devices, tensors, tags and makers from the text of a DAG."""

from __future__ import annotations

import ast
import re
from itertools import chain
from typing import Any

from piper.errors import Problem, Refused
from piper.ir.filters import Filter, where
from piper.ir.flat_layout import Message
from piper.ir.maker import Maker
from piper.ir.message_order import OrderSlot
from piper.ir.nodes import Sum
from piper.ir.values import TensorSpec
from piper.names import NORMAL, Device, NodeId, Share, ValueId

Found = re.Match[str]
Groups = tuple[tuple[Device, ...], ...]
LIST = r"\[\d+(?:, \d+)*\]"
SIZE = r"(?:\d+|\?)"
SPEC = rf"\w+\[(?:{SIZE}(?:, {SIZE})*)?\]"


def message_of(whole: tuple[TensorSpec, ...], tensors: tuple[int, ...], ways: int) -> Message:
    numel = sum(whole[k].numel for k in tensors)
    return Message(whole[tensors[0]].dtype, tensors, numel, -(-numel // ways) * ways)


def ids_of(shown: str) -> tuple[NodeId, ...]:
    return tuple(map(NodeId, filter(None, shown.split(", "))))


def slot_of(shown: str) -> OrderSlot:
    """
    >>> slot_of("PP0:F; where(PASS='REDUCE')")
    OrderSlot(nodes=('PP0:F',), filters=(where(PASS='REDUCE'),), later=(), arrivals=())
    """
    nodes, filters, *more = [part.strip() for part in shown.split(";")]
    return OrderSlot(ids_of(nodes), filters_of(filters), *map(ids_of, more))


def filters_of(shown: str) -> tuple[Filter, ...]:
    """
    >>> filters_of("where(PP=0, PASS='REDUCE'), where(EP=None)")
    (where(PP=0, PASS='REDUCE'), where(EP=None))
    """
    calls = ast.parse(f"[{shown}]", mode="eval").body
    assert isinstance(calls, ast.List)
    return tuple(map(filter_of, calls.elts))


def filter_of(shown: ast.expr) -> Filter:
    """
    >>> filter_of(ast.parse("where(L=range(0, 8), PASS='SEND') & ~where(EP=[0, 2])").body[0].value)
    where(L=range(0, 8), PASS='SEND') & ~where(EP=[0, 2])
    """
    match shown:
        case ast.BinOp(left, ast.BitOr(), right):
            return filter_of(left) | filter_of(right)
        case ast.BinOp(left, ast.BitAnd(), right):
            return filter_of(left) & filter_of(right)
        case ast.UnaryOp(ast.Invert(), part):
            return ~filter_of(part)
        case ast.Call(keywords=tags):
            return where(**{str(tag.arg): tag_of(tag.value) for tag in tags})
        case _:
            fix = "write where(PP=0, PASS='REDUCE')"
            raise Refused(Problem(f"{ast.unparse(shown)} is not a filter", fix))


def tag_of(shown: ast.expr) -> Any:
    """A literal, or a range."""
    if isinstance(shown, ast.Call):
        return range(*(ast.literal_eval(one) for one in shown.args))
    return ast.literal_eval(shown)


def sum_of(shown: str) -> Sum:
    return tuple(map(ValueId, shown.split(" + ")))


def devices_of(shown: str) -> tuple[Device, ...]:
    return tuple(map(int, re.findall(r"\d+", shown)))


def groups_of(shown: str) -> Groups:
    return tuple(map(devices_of, re.findall(LIST, shown)))


def meeting(where: Found) -> dict[str, Any]:
    groups = groups_of(where["groups"])
    flat = tuple(chain.from_iterable(groups))
    devices = devices_of(where["replicas"]) if where["replicas"] else flat
    return {"groups": groups, "devices": devices, "stream": where["stream"]}


def tags_of(where: Found) -> tuple[tuple[str, int], ...]:
    return tuple((key, int(index)) for key, index in pairs(where["tags"] or ""))


def pairs(shown: str) -> list[tuple[str, str]]:
    return re.findall(r"(\S+)=(-?\d+)", shown)


def specs_of(shown: str) -> tuple[TensorSpec, ...]:
    found = re.findall(r"(\w+)\[([^\]]*)\]", shown)
    sizes = [[None if s == "?" else int(s) for s in shape.split(", ") if s] for _, shape in found]
    return tuple(TensorSpec(tuple(s), dtype) for s, (dtype, _) in zip(sizes, found, strict=True))


def maker_of(shown: str) -> Maker:
    found = re.fullmatch(r"(.*) \(directive (\d+) of (\d+)\)", shown)
    return Maker(found[1], int(found[2]), int(found[3])) if found else Maker(shown)


def share_of(shown: str) -> Share:
    stream, _, rest = shown.strip().partition(" (")
    sms = re.search(r"(\d+) SM", rest)
    priority = [word for word in rest.strip(")").split(", ") if word and "SM" not in word]
    return Share(stream, int(sms[1]) if sms else None, *(priority or [NORMAL]))
