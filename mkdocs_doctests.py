"""Doctests in docstrings are code on the site, and names of pages are links.

Markdown alone takes `>>>` for quotes in quotes.
"""

import re
from typing import Any

from griffe import Extension

PROMPT, PAGE = ">>> ", re.compile(r"\bdocs/([\w/]+)\.md\b")


class FencedDoctests(Extension):
    """Extends the plugin that reads docstrings (mkdocs.yml)."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = PAGE.sub(r"[\1](\1.md)", obj.docstring.value)
            obj.docstring.value = fenced(text)


def fenced(text: str) -> str:
    """The same with a fence around each doctest, which ends at an empty line."""
    found: list[str] = []
    end = None
    for line in [*text.splitlines(), ""]:
        indent = line[: len(line) - len(line.lstrip())]
        if end is None and line.startswith(indent + PROMPT):
            end = f"{indent}```"
            found += ["", f"{indent}```pycon"]
        elif end is not None and not line.strip():
            found.append(end)
            end = None
        found.append(line)
    return "\n".join(found).rstrip("\n")
