"""The kinds of work and of memory, with the words and colours of every page and picture."""

from __future__ import annotations

KINDS = {
    "F": ("forward", "#5aa9e6"),
    "B": ("backward", "#1f7a5a"),
    "BI": ("input gradients", "#f4d35e"),
    "BW": ("weight gradients", "#d96c2c"),
    "update": ("optimizer update", "#b48ead"),
    "send": ("send", "#546680"),
    "recv": ("receive", "#9bc4e4"),
    "exchange": ("token all-to-all", "#cc3344"),
    "reduce-scatter": ("reduce-scatter", "#c18bf4"),
    "all-reduce": ("all-reduce", "#9734b3"),
    "gather": ("gather", "#0cb09a"),
    "all-to-all": ("all-to-all", "#9c7909"),
    "all-gather": ("all-gather", "#5b0d19"),
    "shift": ("ring shift", "#4d76fd"),
    "shift-back": ("ring shift back", "#b0c18a"),
    "store": ("store in host memory", "#2c1ef0"),
    "fetch": ("fetch from host memory", "#f0aa10"),
    "loss_norm": ("loss and norm all-reduce", "#8c8577"),
    "other": ("other", "#a9a9a9"),
}

MEMORY = {  # none of the colours above
    "parameters": "#4b4c74", "optimizer": "#cb6b76", "gather buffers": "#4c9036",
    "gradients": "#a2c814", "activations": "#f9c277", "moving": "#a9e3db", "workspace": "#ffeec2",
}  # fmt: skip


def colour(kind: str) -> str:
    return KINDS.get(kind, KINDS["other"])[1]


def word(kind: str) -> str:
    return KINDS.get(kind, (kind, ""))[0]


def ink(fill: str) -> str:
    """Black or white, whichever can be read on a colour.

    >>> ink("#5aa9e6"), ink("#1f7a5a")
    ('#10151c', '#ffffff')
    """
    red, green, blue = (int(fill[k : k + 2], 16) for k in (1, 3, 5))
    return "#10151c" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 * 255 else "#ffffff"
