"""The architecture, held by a test: imports point down only. Change `LAYERS` in a change of its own."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    ("pagedjax.core", "pallas_kernels"),
    ("pagedjax.models",),
    ("pagedjax.weights",),
    ("pagedjax.runtime",),
    ("pagedjax.engine", "pagedjax.simulator"),
    ("pagedjax.llm", "pagedjax.bench"),
    ("serving",),
    ("pagedjax.cli",),
    ("pagedjax.__main__",),
)
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
# Below their own layer, these may reach only what is named.
ONLY = {"pagedjax.simulator": {"pagedjax.core"}, "serving": {"pagedjax.engine", "pagedjax.core"}}
CORE_MAY_USE = sys.stdlib_module_names | {"immutables", "numpy"}
KERNELS_MAY_USE = sys.stdlib_module_names | {"jax", "jaxlib", "jax_triton", "triton", "numpy", "ml_dtypes"}
LIGHT = (
    "pagedjax",
    "pagedjax.core",
    "pagedjax.core.scheduler",
    "pagedjax.cli",
    "pagedjax.engine.config",
    "pagedjax.engine.async_engine",
)
MAY_PRINT = ("pagedjax.cli", "pagedjax.bench")


def test_every_module_belongs_to_a_layer():
    assert [name for name, _ in modules(ROOT) if part_of(name) is None and name != "pagedjax"] == []


def test_imports_point_down_only():
    assert list(violations(ROOT)) == []


def test_no_module_imports_itself_through_others():
    assert cycle(import_graph(ROOT)) is None


def test_nothing_comes_from_the_insides_of_jax():
    inside = [f"{name}: {used}" for name, tree in modules(ROOT) for used in imported(tree) if "jax._src" in used]
    assert inside == []


def test_only_the_command_line_prints():
    talkers = [name for name, tree in modules(ROOT) if prints(tree) and not name.startswith(MAY_PRINT)]
    assert talkers == []


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_without_jax(module):
    heavy = f"import sys, {module}; print(sorted({{'jax', 'flax', 'transformers', 'starlette'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("pagedjax/core/a.py", "import pagedjax.runtime.b", "not below"),
        ("pagedjax/core/a.py", "from pagedjax import engine", "not below"),
        ("pagedjax/core/a.py", "def f():\n    import jax", "may not use jax"),
        ("pallas_kernels/a.py", "from pagedjax.core.plan import Row", "not below"),
        ("serving/a.py", "from pagedjax.runtime import batch", "may not reach"),
        ("pagedjax/models/a.py", "from . import layers", "relative import"),
    ],
)
def test_the_test_sees_an_upward_import(tmp_path, path, source, complaint):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert complaint in "\n".join(violations(tmp_path))


def test_the_test_sees_a_cycle():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every module of the three packages, by dotted name."""
    for path in sorted(
        chain.from_iterable((root / top).rglob("*.py") for top in ("pagedjax", "pallas_kernels", "serving"))
    ):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text())


def part_of(module: str) -> str | None:
    return next((part for part in LAYER_OF if module == part or module.startswith(part + ".")), None)


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, at its top or inside functions; relative ones keep their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def violations(root: Path) -> Iterator[str]:
    for name, tree in modules(root):
        part = part_of(name)
        for used in imported(tree) if part else ():
            yield from (f"{name}: {fault}" for fault in faults(part, used))


def faults(part: str, used: str) -> Iterator[str]:
    target, top = part_of(used), used.split(".")[0]
    if used.startswith("."):
        yield f"relative import {used}"
    elif target and target != part and LAYER_OF[target] >= LAYER_OF[part]:
        yield f"{used} is not below {part}"
    elif target and target != part and part in ONLY and target not in ONLY[part]:
        yield f"{part} may not reach {used}"
    elif target is None and top != "pagedjax":
        if part == "pagedjax.core" and top not in CORE_MAY_USE:
            yield f"core may not use {top}"
        if part == "pallas_kernels" and top not in KERNELS_MAY_USE:
            yield f"kernels may not use {top}"


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module -> the project's modules that it imports at its top level (imports inside functions break cycles)."""
    names = {name for name, _ in modules(root)}
    return {
        name: {target for used in imported(ast.Module(top_level(tree), [])) for target in resolve(used, names)} - {name}
        for name, tree in modules(root)
    }


def top_level(tree: ast.Module) -> list[ast.stmt]:
    return [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]


def resolve(used: str, names: set[str]) -> set[str]:
    """The module that an imported name means: itself, or the one that holds it."""
    holder = used.rpartition(".")[0]
    return {used} & names or {holder} & names


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """One import cycle as the path around it, or None."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        found = next((c for c in (visit(n, [*path, name]) for n in sorted(graph.get(name, ()))) if c), None)
        done.add(name)
        return found

    return next((c for c in (visit(name, []) for name in sorted(graph)) if c), None)


def prints(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in ast.walk(tree)
    )
