"""The page of commands says what the commands say."""

import re
from collections.abc import Callable

from commands_page import page


def test_the_page_has_every_command_and_option_with_a_meaning(
    golden: Callable[[str, str], None],
) -> None:
    text = page()

    golden("../../docs/commands.md", text)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert [line for line in rows if line.endswith("|  |")] == []


def test_the_page_has_no_brackets_that_markdown_takes_for_a_link() -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page(), flags=re.DOTALL)

    assert re.findall(r"\[[^]]*\[|\]\s*\[", prose) == []
