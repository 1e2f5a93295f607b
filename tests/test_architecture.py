"""Which layers may import which, where torch may be used, and how long files and functions are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import FILES, ROOT, nodes

WORDS = {"names", "errors", "garbage", "shown_warnings"}  # leaves
IR = {"ir", *WORDS}
MAY_IMPORT: dict[str, set[str]] = {
    "names": set(),
    "errors": set(),
    "garbage": set(),
    "shown_warnings": set(),
    "ir": WORDS,
    "costs": IR,
    "capture": IR,
    "directives": IR,
    "passes": {"costs", *IR},
    "plan": IR,
    "strategies": {"directives", "costs", *IR},
    "runtime": {"plan", *WORDS},
    "sim": {"plan", "costs", *WORDS},
    "view": {"plan", "sim", *IR},
    "launcher": WORDS,
    "models": {"capture", *WORDS},
}
MAY_IMPORT["job"] = set(MAY_IMPORT)  # all but the Trainer, which runs jobs
TOP = {"trainer", "pretrained", "pictures", "cli", "__init__", "__main__"}  # may import anything
TORCH = {"capture", "runtime", "models", "job", "trainer", "pretrained"}
RAY = {"launcher"}


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    """Syntax trees are many objects: garbage collections of other tests would scan them."""
    yield
    nodes.cache_clear()


def layer_of(module: str) -> str:
    """piper.ir.dag is in ir, piper.trainer in trainer, piper itself in __init__."""
    return module.split(".")[1] if "." in module else "__init__"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(path: Path) -> tuple[str, ...]:
    return tuple(imports_of(path))


def imports_of(path: Path) -> Iterator[str]:
    """Every module a file imports, also in functions and under TYPE_CHECKING.

    A name taken from a package may be a module of it: `from piper import ir` is piper.ir.
    """
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: 1 - node.level or None] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (target(source, alias.name) for alias in node.names)


def target(source: str, name: str) -> str:
    inside = ROOT.parent.joinpath(*source.split("."), name)
    is_module = inside.with_suffix(".py").exists() or inside.is_dir()
    return f"{source}.{name}" if is_module else source


def of_piper(path: Path) -> list[str]:
    return [name for name in imported(path) if name == "piper" or name.startswith("piper.")]


def test_every_layer_is_in_the_table() -> None:
    layers = {layer_of(module_of(path)) for path in FILES}

    unknown = layers - set(MAY_IMPORT) - TOP

    assert not unknown


def allowed_for(path: Path) -> set[str]:
    layer = layer_of(module_of(path))
    return set(MAY_IMPORT) | TOP if layer in TOP else {layer, *MAY_IMPORT[layer]}


def test_a_layer_imports_only_what_the_table_allows() -> None:
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in FILES
        for name in of_piper(path)
        if layer_of(name) not in allowed_for(path)
    ]

    assert not wrong


@pytest.mark.parametrize(("library", "homes"), [("torch", TORCH), ("ray", RAY)])
def test_a_heavy_library_is_imported_in_few_layers(library: str, homes: set[str]) -> None:
    others = [path for path in FILES if layer_of(module_of(path)) not in homes]

    wrong = [
        module_of(path)
        for path in others
        if any(name.split(".")[0] == library for name in imported(path))
    ]

    assert not wrong


PRIVATE_HERE = {
    "capture/torch_private.py", "capture/inductor_private.py", "capture/cache/torch_private.py",
    "capture/modes_private.py", "capture/tracing_private.py", "capture/autograd_private.py",
    "runtime/torch_private.py",
    "models/transformers_private.py", "capture/trace/replaced/transformer_private.py",
    "capture/trace/replaced/arguments_private.py",
}  # fmt: skip
OURS = {"self", "cls", "sys", "os"}  # their private attributes are not torch's
OPERATORS = {"aten"}  # public, even if their name begins with _


def private_names(path: Path) -> Iterator[str]:
    """Names of imports, of attributes, and in `getattr` and `hasattr`."""
    for node in nodes(path):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Attribute(value=ast.Name(id=owner)) if owner in OURS | OPERATORS:
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value), *_]
            ):
                yield str(value)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_of_torch_are_in_one_file_of_a_layer() -> None:
    others = [path for path in FILES if path.relative_to(ROOT).as_posix() not in PRIVATE_HERE]

    wrong = [
        f"{module_of(path)} uses {name}"
        for path in others
        if layer_of(module_of(path)) in TORCH
        for name in private_names(path)
        if is_private(name)
    ]

    assert not wrong


def in_rings(needs: dict[str, set[str]]) -> set[str]:
    """Those that need themselves, by way of others."""
    waiting = {name: needed - {name} for name, needed in needs.items()}
    free = [name for name, needed in waiting.items() if not needed & set(waiting)]
    while free:
        for name in free:
            del waiting[name]
        free = [name for name, needed in waiting.items() if not needed & set(waiting)]
    return set(waiting)


def test_modules_do_not_import_each_other_in_rings() -> None:
    assert not in_rings({module_of(path): set(of_piper(path)) for path in FILES})


# Some of their files are below the folders beside them, and some above.
ONE_FILE_ROOMS = {"piper.capture", "piper.capture.graphs.division", "piper.runtime"}


def room_of(module: str) -> str:
    """The folder of a module; the files of a layer beside its folders are a room too."""
    is_folder = ROOT.parent.joinpath(*module.split(".")).is_dir()
    folder = module.rpartition(".")[0]
    return module if is_folder or folder in ONE_FILE_ROOMS else folder


@pytest.mark.parametrize("layer", sorted(set(MAY_IMPORT) - WORDS))
def test_the_rooms_of_a_layer_do_not_import_each_other_in_rings(layer: str) -> None:
    needs: dict[str, set[str]] = {}
    for path in (ROOT / layer).rglob("*.py"):
        inside = {room_of(name) for name in of_piper(path) if layer_of(name) == layer}
        needs.setdefault(room_of(module_of(path)), set()).update(inside)

    assert not in_rings(needs)


def test_a_room_has_at_most_20_files() -> None:
    sizes = Counter(path.parent for path in FILES if path.name != "__init__.py")

    crowded = {str(room.relative_to(ROOT)): size for room, size in sizes.items() if size > 20}

    assert not crowded


def test_the_compiler_and_the_commands_are_imported_without_torch() -> None:
    modules = "piper, piper.job.compile.compiler, piper.strategies, piper.plan.check.check"
    others = "piper.ir.text.text, piper.passes.pass_pipeline, piper.view.schedule_grid, "
    others += "piper.launcher.local, piper.job.launching, piper.cli"
    program = f"import sys, {modules}, {others}; print('torch' in sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent, check=True
    )

    assert done.stdout == "False\n"


def test_a_file_has_at_most_400_lines() -> None:
    lengths = {module_of(path): len(path.read_text().splitlines()) for path in FILES}

    long = {module: length for module, length in lengths.items() if length > 400}

    assert not long


def test_a_function_has_at_most_50_lines() -> None:
    functions = [
        (module_of(path), node)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]

    long = [
        f"{module}.{node.name}"
        for module, node in functions
        if (node.end_lineno or 0) - node.lineno + 1 > 50
    ]

    assert not long


PARSING = {
    "partition", "rpartition", "split", "rsplit", "startswith", "endswith", "removeprefix",
    "removesuffix", "find", "rfind", "splitlines",
}  # fmt: skip
OTHER_TEXT = {  # they parse text that is not a name of a node, value, region or instruction
    "piper.costs.device_lists": "options that name kinds of devices",
    "piper.costs.measured": "keys of cost files written by older versions",
    "piper.ir.text.notation": "the text form of a DAG, in which names are atoms",
    "piper.ir.text.parse": "the text form of a DAG, in which names are atoms",
    "piper.job.arguments": "Python's name of a function",
    "piper.job.memory.host_memory": "/proc/meminfo",
    "piper.job.numerics.model": "paths of modules, errors",
    "piper.runtime.gpu.cuda_graphs": "errors of CUDA",
    "piper.runtime.checkpoint.description": "torch's name of a type",
    "piper.runtime.checkpoint.format.plain_values": "torch's name of a type",
    "piper.errors": "the text of an error of Python or torch",
    "piper.runtime.checkpoint.writer": "torch's name of a type",
    "piper.runtime.state.initial_values": "paths of modules",
    "piper.runtime.optimizers.known_optimizers": "Python's name of a module",
    "piper.runtime.optimizers.user_optimizer": "Python's name of a module",
    "piper.strategies.device_mesh": "the axes of a mesh, as a user writes them",
    "piper.strategies.pytorch_csv": "PyTorch's schedule text",
    "piper.view.page": "the template of the page",
}
READS_TEXT = {"capture", "launcher", "models", "cli"}  # layers that read sources, files and options


def takes_text_apart(path: Path) -> Iterator[str]:
    """Calls of methods of strings that look inside, and questions like `"@" in name`."""
    for node in nodes(path):
        match node:
            case ast.Call(func=ast.Attribute(attr=name), args=[ast.Constant(value=str()), *_]):
                if name in PARSING:
                    yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr=name), args=[]) if name in PARSING:
                yield ast.unparse(node)
            case ast.Compare(left=ast.Constant(value=str(sign)), ops=[ast.In() | ast.NotIn()]):
                if not sign.isidentifier():
                    yield ast.unparse(node)


def test_nobody_takes_a_name_apart() -> None:
    """The facts in a name are also fields of its owner; see also tests/test_names.py."""
    modules = {path: module_of(path) for path in FILES}

    wrong = {
        module: found
        for path, module in modules.items()
        if layer_of(module) not in READS_TEXT and module not in OTHER_TEXT
        if (found := list(takes_text_apart(path)))
    }

    assert not wrong


def defined(path: Path) -> Iterator[str]:
    """Names at the top of a module. A decorator may register a function, which is a use of it."""
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name, decorator_list=[]) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def used(path: Path) -> Iterator[str]:
    for node in nodes(path):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.name for alias in names)
            case ast.Constant(value=str(text)) if " " not in text:
                yield from text.replace("[", ".").replace("]", ".").split(".")


def test_what_only_tests_use_is_not_in_the_source() -> None:
    """Models are there to be imported by users."""
    known = {name for path in FILES for name in used(path)}

    unused = {
        f"{module_of(path)}.{name}"
        for path in FILES
        if layer_of(module_of(path)) != "models"
        for name in defined(path)
        if name not in known and not name.startswith("__")
    }

    assert not unused
