"""The help of commands: flags take no value, so no type is shown beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from piper.errors import nearest

VERBS = ("list", "ls", "verify", "inspect", "info", "cat", "load", "print", "dump", "describe")


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
            folder = next(iter(words_after(args)), "FOLDER" if args[0] in VERBS else args[0])
            ctx.fail(f"{args[0]!r} is not a command. Write: piper {self.name} {only} {folder}")
        script = next((word for word in words_after(args) if word.endswith(".py")), None)
        if args[0] not in self.commands and script and not nearest(args[0], list(self.commands)):
            ctx.fail(f"{args[0]!r} is not a command. To run a script, write: piper run {script}")
        return super().resolve_command(ctx, args)


def words_after(args: Sequence[str]) -> list[str]:
    """Words behind the first one that are no options."""
    return [word for word in args[1:] if not word.startswith("-")]
