"""The rules a reviewer would otherwise have to remember."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = {
    "lmtier": ROOT / "lmtier",
    "lmtier_backends": ROOT / "backends/lmtier_backends",
    "lmtier_integrations": ROOT / "integrations/lmtier_integrations",
}
SOURCES = [(package, path) for package, root in ROOTS.items() for path in sorted(root.rglob("*.py"))]
CORE = [path for package, path in SOURCES if package == "lmtier"]
every_module = pytest.mark.parametrize("path", [path for _, path in SOURCES], ids=lambda path: path.stem)


def tree(path):
    return ast.parse(path.read_text())


def imported(node):
    """The modules that the import statements below `node` name; `from a import b` names both a and a.b."""
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            yield from (alias.name for alias in each.names)
        elif isinstance(each, ast.ImportFrom):
            assert not each.level, "relative import"
            yield str(each.module)
            yield from (f"{each.module}.{alias.name}" for alias in each.names)


def at_module_level(path):
    """What is imported when the module is: not within functions, not for type checkers only."""
    body = [
        node
        for node in tree(path).body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return set(imported(ast.Module(body, [])))


def users(module):
    """The files of all packages that import `module`, wherever in them."""
    heads = {path.name: {name.split(".")[0] for name in imported(tree(path))} for _, path in SOURCES}
    return {name for name, found in heads.items() if module in found}


def names(path):
    return {ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute | ast.Name)}


@pytest.mark.parametrize(("package", "path"), SOURCES, ids=lambda each: getattr(each, "stem", each))
def test_dependencies_point_inward(package, path):
    ours = {name.split(".")[0] for name in imported(tree(path))} & ROOTS.keys()
    assert ours <= {"lmtier", package}


@pytest.mark.parametrize("path", sorted(ROOTS["lmtier_backends"].glob("*.py")), ids=lambda path: path.stem)
def test_a_backend_sees_the_seam_and_nothing_else_of_the_core(path):
    seam = {"tier", "workers", "codec", "layout", "errors", "forks"}
    core = {name.split(".")[1] for name in imported(tree(path)) if name.startswith("lmtier.")}
    assert core <= seam


@every_module
def test_a_module_opens_with_its_charter(path):
    charter = ast.get_docstring(tree(path)) or ""
    first = " ".join(charter.split("\n\n")[0].split())
    assert first.endswith((".", ":", "`.")), f"{path.name} opens with {first!r}, which is no sentence"


def test_imports_form_no_cycle():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in CORE}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {name: at_module_level(path) & modules.keys() - {name} for name, path in modules.items()}
    for name in graph:
        # Every module imports its own package implicitly; what counts is what it asks for by name.
        graph[name] -= {"lmtier"}
    tuple(TopologicalSorter(graph).static_order())


def test_only_metrics_imports_prometheus():
    assert users("prometheus_client") == {"metrics.py"}


def test_torch_is_imported_where_tensors_are_touched():
    assert users("torch") <= {
        *("paging.py", "mover.py", "device.py", "gpu.py"),
        *("demo.py", "transformers.py", "sglang.py", "media.py", "memory.py"),
    }


def test_importing_lmtier_loads_neither_torch_nor_a_backend():
    code = "import sys, lmtier.cache, lmtier.mover, lmtier.cli; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.split(".")[0] for name in out.stdout.split()}
    assert not loaded & {"torch", "lmtier_backends", "lmtier_integrations", "asyncio", "redis"}


def test_threads_live_in_one_module():
    users_of_threads = {path.name for _, path in SOURCES if "threading.Thread" in names(path)}
    assert users_of_threads <= {"workers.py"}
    assert not users("concurrent") | users("multiprocessing")


def test_one_colour():
    assert not users("asyncio")
    assert not any(
        isinstance(node, ast.AsyncFunctionDef) for _, path in SOURCES for node in ast.walk(tree(path))
    )


@every_module
def test_data_is_never_executed(path):
    heads = {name.split(".")[0] for name in imported(tree(path))}
    assert not heads & {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "joblib"}
    assert not names(path) & {"eval", "exec", "torch.load", "np.load", "numpy.load"}


@every_module
def test_only_the_terminal_prints(path):
    assert path.name == "terminal.py" or "print" not in names(path)


@every_module
def test_our_own_objects_are_not_probed(path):
    assert "hasattr" not in names(path)


def test_names_say_what_things_do():
    classes = [
        node.name for _, path in SOURCES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name in classes if name.endswith(("Manager", "Helper", "Util", "Utils", "V2"))]
