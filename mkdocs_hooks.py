"""What the site needs besides the pages: the examples that they link to."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parent / "examples"


def on_files(files: Files, config: Any) -> Files:
    """Scripts lie beside the pages, as text."""
    for script in sorted(EXAMPLES.rglob("*.py")):
        path = f"{script.relative_to(EXAMPLES.parent)}.txt"
        files.append(File.generated(config, path, content=script.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """On the site, examples/ is inside the folder of the pages, and not beside it.

    What a console shows is marked so: its prompts and results are not copied (assets/site.css).
    """
    markdown = markdown.replace("```python\n>>> ", "```pycon\n>>> ")
    up = "../" * page.file.src_uri.count("/")
    text = markdown.replace(f"](../{up}examples/", f"]({up}examples/")
    parts = text.split(f"]({up}examples/")
    return f"]({up}examples/".join(
        [parts[0], *(one.replace(".py)", ".py.txt)", 1) for one in parts[1:])]
    )
