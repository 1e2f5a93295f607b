"""One HTML page that shows strategies and runs. It needs no network and no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from piper.view.kinds import KINDS, MEMORY
from piper.view.view_data import ViewData

SCRIPTS = ("run.js", "lanes.js", "draw.js", "graph.js", "causes.js", "panel.js", "app.js")


def page(runs: Sequence[ViewData]) -> str:
    """The page of these strategies or runs. It opens with a comparison of the first two."""
    data = json.dumps([run.to_dict() for run in runs], separators=(",", ":"))
    parts = {
        "title": escape(" / ".join(run.name for run in runs) or "Piper"),
        "style": asset("style.css"),
        "script": "\n".join([colours(), *map(asset, SCRIPTS)]),
        "data": harmless(data),
    }
    return filled(asset("page.html"), parts)


def colours() -> str:
    return f"const KINDS = {json.dumps(KINDS)}, MEMORY = {json.dumps(MEMORY)};"


def filled(template: str, parts: dict[str, str]) -> str:
    """Fill in a template in one pass, so that inserted text is not searched again."""
    pieces = template.split("{{")
    rest = (piece.split("}}", 1) for piece in pieces[1:])
    return pieces[0] + "".join(parts[name] + text for name, text in rest)


def harmless(text: str) -> str:
    """JSON that cannot end the script tag around it.

    >>> harmless('["</script>"]')
    '["\\\\u003c/script>"]'
    """
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def asset(name: str) -> str:
    return (files("piper.view") / "assets" / name).read_text(encoding="utf-8")
