"""The page of all commands, made from the command line itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer

from piper.cli import app

HEAD = """# Commands

Every command, with all its arguments and options. `piper COMMAND --help` prints the same in a
terminal. Options with `...` need a value.
"""


def page() -> str:
    return "\n".join([HEAD, *section("piper", typer.main.get_command(app))])


def section(name: str, command: Any) -> Iterator[str]:
    """A command, and the commands in it."""
    yield f"## {name}\n"
    yield from described(inspect.cleandoc(command.help or ""))
    rows = [row(one) for one in command.params if not getattr(one, "hidden", False)]
    if rows:
        yield from ["| | default | meaning |", "| --- | --- | --- |", *rows, ""]
    for inner, one in getattr(command, "commands", {}).items():
        yield from section(f"{name} {inner}", one)


def described(text: str) -> Iterator[str]:
    """The paragraphs of a docstring. Examples are code."""
    for paragraph in text.split("\n\n"):
        example = re.match(r"Examples?: (.*)", paragraph, re.DOTALL)
        lines = re.split(r";\s+", example[1]) if example else []
        yield "\n".join(["```", *lines, "```", ""]) if lines else f"{paragraph}\n"


def row(parameter: Any) -> str:
    named = parameter.param_type_name == "option"
    words = parameter.opts if named else [parameter.metavar or parameter.name.upper()]
    value = " ..." if named and not parameter.is_flag else ""
    names = ", ".join(f"`{one}{value}`" for one in words)
    return f"| {names} | {default(parameter)} | {meaning(parameter)} |"


def default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    return "" if value is None or value is False else f"`{getattr(value, 'value', value)}`"


def meaning(parameter: Any) -> str:
    value, text = parameter.default, parameter.help or ""
    choices = [one.value for one in type(value)] if isinstance(value, Enum) else []
    return f"{text}: {', '.join(f'`{one}`' for one in choices)}" if choices else text
