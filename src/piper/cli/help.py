"""The help of commands: flags take no value, so no type is shown beside them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


def without_types(params: list[Any]) -> list[Any]:
    for one in params:
        if getattr(one, "is_flag", False):
            one.metavar = ""
    return params


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))
