"""JSON files that begin with a digest of the rest: any change of a byte is noticed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from piper.runtime.checkpoint.format.files import digest_of
from piper.runtime.checkpoint.format.problems import damaged
from piper.runtime.checkpoint.format.strict_values import parsed_json

HEAD = b'{"digest": "'
TAIL = b'", '
SIZE = len(HEAD) + 2 * hashlib.sha256().digest_size + len(TAIL)


def sealed(body: dict[str, Any]) -> bytes:
    """
    >>> sealed({"steps": 3}).decode()[:20]
    '{"digest": "c70fe001'
    """
    text = f"{json.dumps(body)}\n".encode()
    return HEAD + digest_of(text).encode() + TAIL + text[1:]


def unsealed(path: Path, content: bytes) -> dict[str, Any]:
    """What was sealed, if nothing was changed since."""
    text, digest = b"{" + content[SIZE:], content[len(HEAD) : SIZE - len(TAIL)]
    whole = content[: len(HEAD)] == HEAD and content[SIZE - len(TAIL) : SIZE] == TAIL
    if not whole or digest_of(text).encode() != digest:
        raise damaged(path, "is damaged: it is not what its digest says")
    try:
        found: dict[str, Any] = parsed_json(text)
    except ValueError as error:
        raise damaged(path, f"is not JSON that Piper writes ({str(error)[:80]})") from None
    return found
