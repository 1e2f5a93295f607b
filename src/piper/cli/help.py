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

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments as every version of typer once wrote them, without braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Scripts are run by a command, as with torchrun, and not by themselves."""
        if args[0].endswith(".py"):
            ctx.fail(f"{args[0]!r} is not a command. To run a script, write: piper run {args[0]}")
        if args[0] not in self.commands and len(self.commands) == 1:
            (only,) = self.commands
            ctx.fail(f"{args[0]!r} is not a command. Write: piper {self.name} {only} {args[0]}")
        return super().resolve_command(ctx, args)
