"""The import direction and the other rules that hold for every source file, read off the syntax trees."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = ("configs", "kernels", "sharding")
# The layers from the ground up, by the first name inside jaxinfer; whatever is not listed is a front end.
LAYERS = (
    {"configs", "kernels", "shapes"},
    {"sharding"},
    {"model", "cache", "checkpoint", "quant", "tokenizer"},
    {"engine"},
)
# The engine's pure parts: they are tested, and reasoned about, without a device.
WITHOUT_JAX = {
    "jaxinfer.engine." + name for name in ("request", "step", "pages", "scheduler", "output", "engine", "loop")
}
WEB = {"fastapi", "pydantic", "starlette", "uvicorn"}
WEB_FOLDERS = ("jaxinfer.serve", "jaxinfer.server", "jaxinfer.http")


def sources() -> dict[str, Path]:
    """Module name -> file, for all of jaxinfer; the linked folders count as its parts (rglob follows no links)."""
    files = {}
    for folder in ("jaxinfer", *TOP):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            files[name if folder == "jaxinfer" else f"jaxinfer.{name}"] = path
    return files


SOURCES = sources()


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """Every module that `module` imports, anywhere in it, and whether only for annotations (under TYPE_CHECKING)."""
    tree = ast.parse(SOURCES[module].read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: expected absolute imports, found a relative one in line {node.lineno}"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in SOURCES else node.module for name in whole]
        for name in names:
            yield str(name), id(node) in guarded


def layer(module: str) -> int:
    """0 configs and kernels, 1 sharding, 2 the model layer, 3 the engine, 4 the front ends."""
    part = [*module.split("."), ""][1]
    return next((number for number, parts in enumerate(LAYERS) if part in parts), len(LAYERS))


@pytest.mark.parametrize("module", [name for name in SOURCES if name != "jaxinfer"])
def test_imports_point_down(module: str) -> None:
    for name, annotations_only in imports(module):
        first = name.split(".")[0]
        assert first not in TOP, f"{module} imports {name}: expected jaxinfer.{name}"
        assert first != "tests", f"{module} imports {name}"
        if first == "jaxinfer" and not annotations_only:
            assert layer(name) <= layer(module), f"{module} imports {name}, which stands above it"
            if layer(module) == 0:
                own, other = module.split(".")[1], name.split(".")[1]
                assert own == other or own == "shapes", f"{module} imports {name}: the ground folders know no other"
        if first in WEB:
            assert module.startswith(WEB_FOLDERS), f"{module} imports {name}: only the server may"


def reachable(module: str) -> set[str]:
    """All that is loaded when `module` is imported: its imports, and the packages around them, to any depth."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in SOURCES:
            todo += [imported for imported, annotations_only in imports(name) if not annotations_only]
        if "." in name:
            todo.append(name.rpartition(".")[0])
    return seen


@pytest.mark.parametrize("module", sorted(WITHOUT_JAX))
def test_the_pure_parts_of_the_engine_do_not_load_jax(module: str) -> None:
    assert not {"jax", "flax"} & reachable(module)


def test_the_top_folders_are_linked_and_are_no_packages() -> None:
    for name in TOP:
        link = ROOT / "jaxinfer" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name
        assert not (ROOT / name / "__init__.py").exists()


def text_files() -> list[Path]:
    """Every file of text that the project itself wrote."""
    folders = ("jaxinfer", *TOP, "tests", "launch", "docs", ".ci")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found += [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt")]
    return [p for p in found if p.suffix in {".py", ".md", ".sh", ".toml", ".txt", ""} and "fixtures" not in p.parts]


def test_no_file_is_longer_than_500_lines() -> None:
    code = [path for path in text_files() if path.suffix == ".py"]
    assert code
    too_long = {str(p.relative_to(ROOT)): n for p in code if (n := p.read_text().count("\n")) > 500}
    assert not too_long


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    place = re.compile(r"(?<![\w.~])/(work|root|tmp|home)/\w")
    assert not [
        f"{path.relative_to(ROOT)}: {line}"
        for path in text_files()
        for line in path.read_text().splitlines()
        if place.search(line)
    ]


def test_no_import_error_is_swallowed() -> None:
    """A missing kernel or library must be seen: nothing may catch ImportError."""
    for module, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                assert "ImportError" not in ast.unparse(node.type), f"{module}, line {node.lineno}"
                assert "ModuleNotFoundError" not in ast.unparse(node.type), f"{module}, line {node.lineno}"
