"""Imports point down: from the command line to the runtime and the compiler, and from layer to layer in each half.

An import counts wherever it stands: at the top of a module, in a function, under TYPE_CHECKING, or in a string of code.
"""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HALVES = ("compiler", "runtime", "cli")  # each may import those before it; the first two are halves, the third is above
HEAVY = ("torch", "triton", "numpy", "safetensors", "brotli")
IMPORT_IN_TEXT = re.compile(r"(?:from|import)\s+(specc(?:\.\w+)+)(?:\s+import\s+(\w+))?")


def name_of(path: Path) -> str:
    """The dotted name of a module or package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("specc", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {
    name_of(path): path for half in HALVES if (ROOT / half).is_dir() for path in sorted((ROOT / half).rglob("*.py"))
}


def imports(path: Path, at_import_time: bool = False) -> Iterator[str]:
    """Absolute names of all that a module ever imports, or of what it imports while it is imported itself."""
    tree = ast.parse(path.read_text())
    nodes: Iterator[ast.AST] = _executed(tree) if at_import_time else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name_of(path).split(".")
            if path.name != "__init__.py":
                package = package[:-1]
            origin = ".".join((*package[: len(package) - node.level + 1], node.module or "")) if node.level else ""
            name = origin.strip(".") or node.module or ""
            yield from (f"{name}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not at_import_time:
            for module, attribute in IMPORT_IN_TEXT.findall(node.value):
                yield f"{module}.{attribute}" if attribute else module


def _executed(tree: ast.Module) -> Iterator[ast.AST]:
    """The statements that run when a module is imported, without those for type checkers."""
    for node in tree.body:
        typing = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        yield from node.orelse if typing else [node]  # type: ignore[attr-defined]


def target(name: str) -> str | None:
    """The module of ours that an imported name is, or stands in; None for other packages."""
    parts = name.split(".")
    result = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
    return next((module for module in result if module in MODULES), None)


@cache
def edges() -> Mapping[str, frozenset[str]]:
    """The modules of ours that each module imports."""
    return {
        module: frozenset(result for name in imports(path) if (result := target(name)) is not None and result != module)
        for module, path in MODULES.items()
    }


def layers(half: str) -> tuple[str, ...]:
    """The layers of a half, lowest first."""
    result: tuple[str, ...] = importlib.import_module(f"specc.{half}").LAYERS
    return result


PRESENT = tuple(half for half in HALVES if f"specc.{half}" in MODULES)


@pytest.mark.parametrize("half", PRESENT)
def test_the_layers_are_what_there_is(half: str) -> None:
    there = {module.split(".")[2] for module in MODULES if module.startswith(f"specc.{half}.")}
    assert sorted(layers(half)) == sorted(there)


@pytest.mark.parametrize("half", ["compiler", "runtime"])
def test_the_architecture_page_lists_the_layers_in_order(half: str) -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition(f"| `{half}`, lowest first | |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = (line.split(" | ")[0] for line in table.splitlines())
    assert [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] == list(layers(half))


def test_imports_point_down() -> None:
    for module, imported in ((module, imported) for module, all_of in edges().items() for imported in all_of):
        half, _, room = module.removeprefix("specc.").partition(".")
        other, _, lower = imported.removeprefix("specc.").partition(".")
        assert HALVES.index(other) <= HALVES.index(half), f"{module} imports {imported}"
        if other == half and room and lower:
            order, importer, its = layers(half), room.split(".")[0], lower.split(".")[0]
            assert order.index(its) <= order.index(importer), f"{module} imports {imported}, which lies above it"


def folder(module: str) -> str:
    """The package that a module lies in; of a package itself, its own name."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def require_no_circle(graph: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_modules_form_no_circle() -> None:
    require_no_circle({module: set(imported) for module, imported in edges().items()})


def test_folders_form_no_circle() -> None:
    """Files beside the folders of a half are rooms of their own: some lie below the folders, some above."""

    def room(module: str) -> str:
        result = folder(module)
        return module if result.count(".") == 1 else result

    graph: dict[str, set[str]] = {}
    for module, imported in edges().items():
        graph.setdefault(room(module), set()).update(room(edge) for edge in imported if room(edge) != room(module))
    require_no_circle(graph)


def test_nothing_heavy_is_imported_with_the_compiler() -> None:
    for module, path in MODULES.items():
        if module.startswith("specc.compiler"):
            names = imports(path, at_import_time=True)
            assert [name for name in names if name.split(".")[0] in HEAVY] == [], module


def test_the_runtime_compiles_through_one_entry() -> None:
    """It may read values of the compiler and ask which scheme or optimizer a parameter has, but `build` makes the
    files."""
    words = ("passes.fuse", "passes.group", "passes.select_kernels", "render.model", "render.body", "render.jinja")
    makers = {f"specc.compiler.{word}" for word in words}
    runtime = {module: imported for module, imported in edges().items() if module.startswith("specc.runtime")}
    assert {module: imported & makers for module, imported in runtime.items() if imported & makers} == {}


def test_no_name_explains_nothing() -> None:
    names = {module.rpartition(".")[2] for module in MODULES}
    assert names.isdisjoint({"utils", "common", "helpers", "manager", "base", "misc"})


@pytest.mark.parametrize("half", ["compiler", "runtime"])
def test_a_folder_is_one_screen(half: str) -> None:
    """Beside its folders, a half has few modules of its own: they are what a reader sees first."""
    crowd: dict[Path, int] = {}
    for path in (ROOT / half).rglob("*.py"):
        crowd[path.parent] = crowd.get(path.parent, 0) + 1
    most = {ROOT / half: 12}
    assert {place: count for place, count in crowd.items() if count > most.get(place, 25)} == {}


def test_templates_stay_templates() -> None:
    for path in sorted((ROOT / "templates").rglob("*.jinja")):
        text = path.read_text()
        assert text.count("{% if ") + text.count("{%- if ") <= 5, path
        assert len(text.splitlines()) <= 150, path


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has imported after running some code."""
    text = f"{code}\nimport sys\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_validate_imports_only_the_kinds_of_the_spec() -> None:
    """A kind that the spec does not name, and the ops that only this kind adds, cost nothing."""
    result = modules_after("from specc.cli.app import run\nassert run(['validate', 'specs/gpt_mlp35.yaml']) == 0")
    loaded = {module.removeprefix("specc.compiler.") for module in result}
    assert loaded >= {"blocks.attention", "blocks.mlp", "architectures.decoder", "spec.optimizers.muon", "quant.gptq"}
    others = {"blocks.lstm", "blocks.moe", "blocks.latent", "architectures.encoder_decoder", "losses.z", "ops.additive"}
    others |= {"quant.int8", "spec.adapt.ttt", "spec.data.polynomial", "spec.optimizers.soap", "ops.experts.router"}
    others |= {"spec.data.lines"}
    assert {module.removeprefix("specc.compiler.") for module in MODULES} >= others
    assert loaded.isdisjoint(others)


def test_importing_all_of_the_compiler_imports_nothing_heavy() -> None:
    names = sorted(module for module in MODULES if module.startswith("specc.compiler"))
    result = modules_after(f"import importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert result.isdisjoint(HEAVY)
