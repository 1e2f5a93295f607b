"""Commands that pass what they do not know on to the user's script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

import typer

from piper.cli.help import Command
from piper.cli.usage import usage
from piper.errors import StrategyError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}  # to the script
OTHER_LAUNCHERS = {  # what they call `-n`
    "--n", "--np", "--nproc", "--nproc-per-node", "--nproc_per_node", "--num-processes",
    "--num_processes", "--processes", "--num-gpus", "--num_gpus",
}  # fmt: skip
HOSTS = {  # options of other launchers that are about several hosts
    "--standalone", "--nnodes", "--num-nodes", "--num_nodes", "--node-rank", "--node_rank",
    "--master-addr", "--master_addr", "--master-port", "--master_port", "--rdzv-backend",
    "--rdzv_backend", "--rdzv-endpoint", "--rdzv_endpoint", "--rdzv-id", "--rdzv_id", "--hostfile",
    "--machine-rank", "--machine_rank", "--num-machines", "--num_machines",
}  # fmt: skip
OPTION = re.compile(r"--?([A-Za-z][\w-]+)(?:=.*)?", re.DOTALL)
ALIKE = 0.8  # of difflib: `--numeric` is 0.93 like `--numerics`, `--steps` 0.7 like `--trace-steps`


class Misspelled(typer.BadParameter):
    """An option that is almost one of Piper's."""

    def __init__(self, word: str, meant: str) -> None:
        super().__init__(
            f"no such option: {word}. Did you mean {meant}? To pass it on to a script, write it "
            "after `--`."
        )

    def format_message(self) -> str:
        return self.message


class Unknown(Misspelled):
    """An option before the target, where only those of Piper can be."""

    def __init__(self, word: str, command: str, known: Sequence[str]) -> None:
        typer.BadParameter.__init__(
            self,
            f"no such option: {word}. `{command}` has {', '.join(known)}. Options of a script are "
            "written after it.",
        )


class OtherHosts(Misspelled):
    """An option of a launcher that connects several hosts."""

    def __init__(self, word: str) -> None:
        typer.BadParameter.__init__(
            self,
            f"no such option: {word}. Leave it out: `piper run -n N` connects the processes of one "
            "host. On several hosts, start the script with torchrun, or with --on ray.",
        )


class PassesOn(Command):
    """A misspelled option of the command is an error, unless the script has an option like it.

    Before the target, so is every other option that the command does not have.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = ctx.meta[__name__] = list(args)
        known = options_of(self)
        before = before_target(words, values_of(self))
        refuse_misspelled(before, known)
        if "-n" in every_option(self):
            refuse_other_counts(before, None)
            refuse_other_hosts(before)
        refuse_unknown(before, ctx.command_path, every_option(self))
        rest = super().parse_args(ctx, args)
        target = ctx.params.get("script") or ctx.params.get("target")
        script = Path(target) if target else None  # some versions of typer still have a text here
        own = before_dashes(ctx)
        passed = [word for word in ctx.args if word in own]
        if "-n" in every_option(self):
            refuse_other_counts(passed, script)
        refuse_misspelled(passed, known, script)
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[ARGUMENTS OF THE SCRIPT]..."]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        for script in [word for word in ctx.meta.get(__name__, ()) if word.endswith(".py")][:1]:
            typer.echo(f"The options of {script} itself: {ctx.command_path} {script} -- --help")


def add_command(app: typer.Typer, name: str, command: Callable[..., None]) -> None:
    app.command(name, cls=PassesOn, context_settings=PASS_ON)(command)


def before_dashes(ctx: Any) -> list[str]:
    """The words before `--`. Those behind it are the script's, whatever they look like."""
    words: list[str] = ctx.meta[__name__]
    return words[: words.index("--")] if "--" in words else words


def options_of(command: Any) -> list[str]:
    return [name for one in command.params for name in one.opts if name.startswith("--")]


def every_option(command: Any) -> list[str]:
    """Also short ones, and `--help`."""
    return [*(name for one in command.params for name in one.opts if name[0] == "-"), "--help"]


def values_of(command: Any) -> list[str]:
    """Options that take the next word as their value."""
    taking = [one for one in command.params if not getattr(one, "is_flag", True)]
    return [name for one in taking for name in one.opts]


def before_target(words: Sequence[str], values: Sequence[str] = ()) -> list[str]:
    """The options before the target, without their values.

    >>> before_target(["--numeric", "--costs", "a.json", "train.py", "--lr", "1"], ["--costs"])
    ['--numeric', '--costs']
    """
    found: list[str] = []
    rest = iter(words)
    for word in takewhile(lambda word: word.startswith("-") and word != "--", rest):
        found.append(word)
        if word in values:
            next(rest, None)
    return found


def refuse_unknown(words: Sequence[str], command: str, known: Sequence[str]) -> None:
    """`-n4` is `-n 4`, and `--device=h200` is `--device h200`."""
    for word in words:
        long = word.startswith("--")
        if (word.partition("=")[0] if long else word[:2]) not in known:
            raise Unknown(word, command, known)


def refuse_misspelled(
    words: Sequence[str], known: Sequence[str], script: Path | None = None
) -> None:
    for word, meant in near_misses(words, known):
        if script is None or not mentions(script, word):
            raise Misspelled(word, meant)


def refuse_other_counts(words: Sequence[str], script: Path | None) -> None:
    """The number of processes, as other launchers write it. A script would not notice it."""
    for option in (word.partition("=")[0] for word in words):
        if option in OTHER_LAUNCHERS and not (script is not None and mentions(script, option)):
            raise Misspelled(option, "-n")


def refuse_other_hosts(words: Sequence[str]) -> None:
    for option in (word.partition("=")[0] for word in words):
        if option in HOSTS:
            raise OtherHosts(option)


def near_misses(words: Sequence[str], known: Sequence[str]) -> Iterator[tuple[str, str]]:
    """
    >>> list(near_misses(["--numeric", "--lr=1", "-1", "--memroy=80"], ["--numerics", "--memory"]))
    [('--numeric', '--numerics'), ('--memroy', '--memory')]
    """
    for word in words:
        option, found = word.partition("=")[0], OPTION.fullmatch(word)
        if found and option not in known:
            written = found[1].replace("_", "-").lower()
            close = get_close_matches(written, [one[2:] for one in known], 1, ALIKE)
            yield from ((option, f"--{meant}") for meant in close)


def mentions(script: Path, option: str) -> bool:
    """Whether a script has this option in its text, as `add_argument` takes it."""
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return re.search(rf"['\"]{re.escape(option)}['\"]", text) is not None


@usage()
def refuse_arguments(target: Path, passed: Sequence[str]) -> None:
    """A strategy or a schedule in a file has no arguments."""
    if passed:
        what = f"only a script takes arguments, and it is not one: {' '.join(passed)}"
        raise StrategyError.of(str(target), what, "leave them out")
