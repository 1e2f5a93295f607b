"""One process of a run: runs the script, and reports why it failed.

python -m piper.launcher.child REPORT PARENT SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import atexit
import logging
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from piper.errors import PeerLost, PiperError, is_echo, is_out_of_memory
from piper.launcher.ending import SYMPTOM, Report
from piper.launcher.parent_death import die_with
from piper.launcher.quick_import import import_quickly
from piper.launcher.script_errors import line_of, shortened
from piper.launcher.script_exit import left, usage_held
from piper.launcher.trace_window import FILE

QUIET = "PIPER_QUIET"  # set by `piper run --quiet`


def main(report: Path, parent: int, script: str, arguments: list[str]) -> int:
    die_with(parent)
    log_progress()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the launcher sees to it
    import_quickly("torch")
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    held: list[str] = []
    try:
        with usage_held(os.environ.get("RANK", "0") == "0") as held:
            runpy.run_path(script, run_name="__main__")
    except PeerLost as error:
        tell(report, str(error), error.culprit, line_of(error))
        return SYMPTOM
    except PiperError as error:
        tell(report, indent(f"{error}{line_of(error)}"))
        return SYMPTOM if is_echo(error) else 1
    except SystemExit as error:
        code, why = left(error, "".join(held))
        if code:
            tell(report, indent(why))
        return code
    except KeyboardInterrupt:
        tell(report, "  it was interrupted (KeyboardInterrupt)")
        return 128 + signal.SIGINT
    except BaseException as error:  # also what is no Exception: an abort of a library, say
        memory = "it is out of memory\n" if is_out_of_memory(error) else ""
        tell(report, indent(memory + shortened(error)), line=line_of(error))
        return SYMPTOM if is_echo(error) or lost_a_peer(error) else 1
    return 0


def tell(report: Path, reason: str, culprit: int | None = None, line: str = "") -> None:
    report.write_text(Report(reason, culprit, time.monotonic(), line).to_json())


def lost_a_peer(error: BaseException) -> bool:
    """Whether gloo raised it: in calls of torch.distributed that the script makes itself."""
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


def log_progress() -> None:
    """The first process logs what Piper does before the first step, unless it must be quiet.

    The others would warn of the same. A script may still give the logger handlers of its own.
    """
    logger = logging.getLogger("piper")
    if os.environ.get("RANK") != "0" or QUIET in os.environ:
        logger.addHandler(logging.NullHandler())  # else Python prints warnings
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("piper: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def finish(report: Path) -> int:
    """Finish steps in flight and saves that are being written: `os._exit` does not. It may fail."""
    failed: list[BaseException] = []
    sys.unraisablehook = lambda found: failed.append(found.exc_value or SystemError())
    atexit._run_exitfuncs()
    for error in failed[:1]:
        tell(report, indent(str(error) if isinstance(error, PiperError) else shortened(error)))
    return 1 if failed else 0


if __name__ == "__main__":
    report = Path(sys.argv[1])
    code = main(report, int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    if code == 0 or FILE in os.environ:  # also an incomplete trace
        code = finish(report) or code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: torch.distributed's threads may still wait for lost peers
