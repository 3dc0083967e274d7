"""Imports point one way, and nothing heavy is imported where it is not needed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "triton", "numpy", "safetensors", "brotli")

# Lower layers first: a module may import from its own layer and from those before it. A folder is its package.
LAYERS = (
    ("errors",),
    ("strict",),
    ("pattern", "targets", "vocabulary", "generated_folder"),
    ("catalog", "text", "expr"),
    ("ir",),
    ("ops",),
    ("blocks", "quant"),
    ("programs",),
    ("architectures",),
    ("spec",),
    ("fusions", "kernels"),
    ("plan",),
    ("passes",),
    ("int8",),
    ("pipeline",),
    ("render", "report"),
    ("build",),
    ("diff",),
    ("cli", "cli_run", "cli_export", "cli_measure", "cli_data"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return sorted(
        path for path in (ROOT / "compiler").rglob("*.py") if path.name != "__init__.py" or path.parent.name == "expr"
    )


def place(path: Path) -> str:
    """The layer word of a module: its folder under compiler/, else its own name."""
    return path.relative_to(ROOT / "compiler").parts[0].removesuffix(".py")


def imports(path: Path, lazy: bool) -> Iterator[str]:
    """Absolute names of what a module imports when it is imported, or with `lazy` ever; typing aside."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if lazy else iter(tree.body)
    typing = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and _typing(node) for inner in ast.walk(node)
    }
    for node in nodes:
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "specc.compiler.expr" if node.level else ""
            name = f"{prefix}.{node.module}".strip(".") if node.module else prefix
            yield from (
                (f"{name}.{alias.name}" for alias in node.names) if name in ("specc.compiler", "specc") else [name]
            )


def _typing(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_every_module_has_a_layer() -> None:
    assert {place(path) for path in modules()} == set(RANK)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT / "compiler")))
def test_imports_point_down(path: Path) -> None:
    for name in imports(path, lazy=True):
        parts = name.split(".")
        if parts[:2] == ["specc", "compiler"] and len(parts) > 2:
            assert RANK[parts[2]] <= RANK[place(path)], f"{place(path)} imports {name}"
        if parts[:2] == ["specc", "runtime"]:
            own = ("cli_run.py", "cli_export.py", "cli_measure.py", "cli_data.py")
            assert path.name in own, f"{place(path)} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT / "compiler")))
def test_nothing_heavy_is_imported_with_the_compiler(path: Path) -> None:
    found = [
        name for name in imports(path, lazy=False) if name.split(".")[0] in HEAVY or name.startswith("specc.runtime")
    ]
    assert found == []


def test_the_runtime_compiles_through_one_entry() -> None:
    """It may read values of the compiler and ask which scheme or optimizer a parameter has, but `build` makes the
    files."""
    words = (
        "passes.fuse",
        "passes.group",
        "passes.select_kernels",
        "render.model",
        "render.body",
        "render.jinja",
        "cli",
    )
    makers = {f"specc.compiler.{name}" for name in words}
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        for name in imports(path, lazy=True):
            assert not any(name == maker or name.startswith(f"{maker}.") for maker in makers), (
                f"{path.name} imports {name}"
            )


def test_no_file_is_long_and_none_is_named_for_nothing() -> None:
    for path in sorted([*(ROOT / "compiler").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")]):
        assert len(path.read_text().splitlines()) <= 400, path
        assert path.stem not in ("utils", "common", "helpers", "manager", "base"), path


def test_templates_stay_templates() -> None:
    for path in sorted((ROOT / "templates").rglob("*.jinja")):
        text = path.read_text()
        assert text.count("{% if ") + text.count("{%- if ") <= 5, path
        assert len(text.splitlines()) <= 150, path


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has imported after running some code."""
    text = f"{code}\nimport sys\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_all_of_the_compiler_imports_nothing_heavy() -> None:
    names = [f"specc.compiler.{place(path)}" for path in modules()]
    found = modules_after(f"import importlib\nfor name in {sorted(set(names))!r}: importlib.import_module(name)")
    assert found.isdisjoint(HEAVY)
