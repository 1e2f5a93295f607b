"""A real browser for tests: Chromium without a window, driven through a pipe.

It needs nothing but Chromium and a shell: messages are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--mute-audio", "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
Point = tuple[float, float]


class Browser:
    """One browser with one tab; `problems` are the errors and warnings of the page."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.home = tempfile.TemporaryDirectory(prefix="piper-browser-", ignore_cleanup_errors=True)
        theirs_in, self.outgoing = pipe()
        self.incoming, theirs_out = pipe()
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        profile = f"--user-data-dir={self.home.name}"
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", CHROMIUM, *FLAGS, profile, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.count, self.buffer, self.events = 0, b"", list[dict[str, Any]]()
        self.session = ""
        self.attach()

    def attach(self) -> None:
        targets: list[dict[str, Any]] = []
        while not targets:
            found = self.call("Target.getTargets")["targetInfos"]
            targets = [one for one in found if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=targets[0]["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser, and wait for its answer."""
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.outgoing, data) :]
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer.get("result", {})
            self.events.append(answer)

    def receive(self, patience: float = 60.0) -> dict[str, Any]:
        until = time.monotonic() + patience
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.incoming], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self.incoming, 1 << 20)
            assert data, "the browser has ended"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Load a page from a file, and wait until it is drawn."""
        self.events.clear()
        self.resize(width, height)
        self.paint(dark)
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())
        self.settle()

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def paint(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def settle(self) -> None:
        """Wait for two frames, so that everything is drawn."""
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def js(self, expression: str) -> Any:
        """Evaluate an expression in the page. Waits for a promise."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)
        self.settle()

    def drag(self, start: Point, end: Point, shift: bool = False) -> None:
        held = {"button": "left", "modifiers": 8 if shift else 0}
        self.mouse("mousePressed", *start, clickCount=1, **held)
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        for x, y in (middle, end):
            self.mouse("mouseMoved", x, y, buttons=1, **held)
        self.mouse("mouseReleased", *end, clickCount=1, **held)
        self.settle()

    def wheel(self, x: float, y: float, amount: float) -> None:
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=amount)
        self.settle()

    def key(self, key: str, shift: bool = False) -> None:
        """Press a key: a character, or a name such as Enter."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"windowsVirtualKeyCode": KEYS[key]} if key in KEYS else {}
        shared = {"key": key, "modifiers": 8 if shift else 0, **code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **shared, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)
        self.settle()

    def type(self, selector: str, text: str) -> None:
        """Type into a field, as it is."""
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        self.settle()

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    @property
    def problems(self) -> list[str]:
        """Exceptions, and what the page or the browser wrote as an error or a warning."""
        found = []
        for event in self.events:
            details = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(details["exceptionDetails"]))
            if event.get("method") == "Runtime.consoleAPICalled" and details["type"] in (
                "error", "warning", "assert",
            ):  # fmt: skip
                found.append(json.dumps(details["args"]))
            if event.get("method") == "Log.entryAdded":
                text = details["entry"]["text"]
                found += [] if "willReadFrequently" in text else [text]  # tests read pixels
        return found

    def close(self) -> None:
        try:
            self.session = ""
            self.call("Browser.close")
        except (AssertionError, OSError):
            self.process.kill()
        self.process.wait(20)
        os.close(self.incoming)
        os.close(self.outgoing)
        self.home.cleanup()


def pipe() -> tuple[int, int]:
    """A pipe whose ends are none of the numbers that Chromium takes for its own (3 and 4)."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
