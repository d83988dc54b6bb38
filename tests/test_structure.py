"""The house rules that no type checker knows: import direction, links, and what a wheel holds."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("kernels", "calib", "export", "evalsuite", "runtime")

# Lowest first; a module may import from its own layer and those before it.
LAYERS = (
    {"artifacts", "distributed", "errors", "signals", "lookup", "progress", "scheme", "devices"},
    {"models"},
    {"kernels"},
    {"calib"},
    {"export"},
    {"runtime"},
    {"evalsuite"},
    {
        "recipe",
        "recipes",
        "knapsack",
        "assign",
        "plan",
        "resume",
        "run",
        "budget",
        "block",
        "solve",
    },
    {"finish", "quantize", "train_draft", "convert", "ablate", "render"},
    {"cli", "options", "recipes_cli", "serving_cli"},
    {"__main__"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def modules() -> list[tuple[str, Path]]:
    """(name under compress, file) of every Python file of the package, links not followed twice."""
    found = [
        (path.relative_to(ROOT / "compress"), path) for path in (ROOT / "compress").glob("*.py")
    ]
    for folder in ("compress/models", *ROOMS):
        base = ROOT / "compress" if folder == "compress/models" else ROOT
        found += [(path.relative_to(base), path) for path in (ROOT / folder).rglob("*.py")]
    return [(".".join(name.with_suffix("").parts), path) for name, path in found]


def imported_rooms(path: Path) -> set[str]:
    """First name under `compress` of everything that the file imports from the project."""
    rooms = set()
    for node in ast.walk(_at_run_time(ast.parse(path.read_text(encoding="utf-8")))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "compress" and len(parts) > 1:
                rooms.add(parts[1])
    return rooms - {"__version__"}


def _at_run_time(tree: ast.Module) -> ast.Module:
    """`tree` without what stands at its top for type checkers only."""
    body = [
        other
        for node in tree.body
        for other in (node.orelse if ast.unparse(node).startswith("if TYPE_CHECKING:") else [node])
    ]
    return ast.Module(body=body, type_ignores=[])


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_point_one_way(name: str, path: Path) -> None:
    own = name.split(".")[0]
    if own == "__init__":
        assert not imported_rooms(path)
        return
    upward = {room for room in imported_rooms(path) if RANK[room] > RANK[own]}
    assert not upward, f"{name} imports from a layer above it: {sorted(upward)}"


def test_import_check_sees_an_upward_import(tmp_path: Path) -> None:
    file = tmp_path / "low.py"
    file.write_text("def f():\n    from compress.cli import run\n    import compress.runtime.x\n")
    assert imported_rooms(file) == {"cli", "runtime"}


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import compress, sys; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_names_of_the_package_are_what_their_modules_hold() -> None:
    import compress
    from compress.runtime.llm import LLM

    assert compress.LLM is LLM
    for name in compress.__all__:
        assert getattr(compress, name)
    with pytest.raises(AttributeError, match="no attribute 'LLm'"):
        compress.LLm  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("room", [*ROOMS, "recipes"])
def test_room_is_linked_and_has_no_init(room: str) -> None:
    link = ROOT / "compress" / room
    assert link.is_symlink()
    assert link.resolve() == ROOT / room
    assert not (ROOT / room / "__init__.py").exists()


def test_no_file_is_longer_than_400_lines() -> None:
    long = {name: len(path.read_text().splitlines()) for name, path in modules()}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a freshly built wheel."""
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source") / "tree"
    unwanted = shutil.ignore_patterns(
        ".*", "demo-w4a16", "build", "dist", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=unwanted)  # setuptools writes beside it
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "-w", str(folder), str(source)], check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file).namelist()


def test_wheel_has_one_top_level_name(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"compress"}


def test_wheel_holds_every_module_and_recipe(wheel: list[str]) -> None:
    expected = {f"compress/{name.replace('.', '/')}.py" for name, _ in modules()}
    expected |= {f"compress/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert expected | {"compress/py.typed"} <= set(wheel)
