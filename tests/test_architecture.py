"""The rules a reviewer would otherwise have to remember."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
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
LAYERS = (
    ("errors", "_version"),
    ("threads", "forks"),
    ("format",),
    ("rules", "observe"),
    ("config",),
    ("tiers",),
    ("core",),
    ("copy", "wire"),
    ("client", "server"),
    ("testing",),
    ("tools",),
    ("__main__",),
)
"""Lowest first. A part imports from those below it, and from itself."""
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
every_module = pytest.mark.parametrize("path", [path for _, path in SOURCES], ids=lambda path: path.stem)


@cache
def tree(path):
    return ast.parse(path.read_text())


@cache
def walked(node):
    return tuple(ast.walk(node))


def imported(node):
    """The modules that the import statements below `node` name; `from a import b` names both a and a.b."""
    for each in walked(node):
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


@cache
def names(path):
    return {ast.unparse(node) for node in walked(tree(path)) if isinstance(node, ast.Attribute | ast.Name)}


@pytest.mark.parametrize(("package", "path"), SOURCES, ids=lambda each: getattr(each, "stem", each))
def test_a_package_is_used_by_no_other_but_lmtier_by_all(package, path):
    ours = {name.split(".")[0] for name in imported(tree(path))} & ROOTS.keys()
    assert ours <= {"lmtier", package}


def parts(path):
    """The parts of lmtier that a module imports, wherever in it."""
    return {name.split(".")[1] for name in imported(tree(path)) if name.startswith("lmtier.")} & RANK.keys()


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_arrows_point_down(path):
    part = path.relative_to(ROOTS["lmtier"]).parts[0].removesuffix(".py")
    if part == "__init__":  # one import away is everything
        return
    assert {other for other in parts(path) if other != part and RANK[other] >= RANK[part]} == set()


@pytest.mark.parametrize("path", sorted(ROOTS["lmtier_backends"].rglob("*.py")), ids=lambda path: path.stem)
def test_a_backend_sees_the_seam_and_nothing_above_it(path):
    assert parts(path) <= {"errors", "threads", "forks", "format", "tiers", "wire"}


@pytest.mark.parametrize(
    "path", sorted(ROOTS["lmtier_integrations"].rglob("*.py")), ids=lambda path: path.stem
)
def test_an_integration_decides_nothing(path):
    seen = {"errors", "forks", "threads", "format", "rules", "observe", "config", "copy", "wire", "client"}
    of_core = {name.split(".")[2] for name in imported(tree(path)) if name.startswith("lmtier.core.")}
    if path.name == "vllm_tier.py":  # it has a tier
        assert of_core <= {"match", "index", "lower", "lower_tiers"}
        seen |= {"tiers"}
    else:
        assert of_core <= {"grant", "match"}
    if path.name == "demo.py":  # for people
        seen |= {"tools"}
    assert parts(path) - {"core"} <= seen


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
        *("layers.py", "mover.py", "device.py", "gpu.py"),
        *(
            "demo.py",
            "prefix_cache.py",
            "stored_cache.py",
            "buffer.py",
            "places.py",
            "model.py",
            "prefill.py",
        ),
        *("sglang.py", "media.py", "loaded_model.py"),
    }


def test_importing_lmtier_loads_neither_torch_nor_a_backend():
    code = "import sys, lmtier.core.cache, lmtier.copy.mover, lmtier.tools.cli; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.split(".")[0] for name in out.stdout.split()}
    assert not loaded & {"torch", "lmtier_backends", "lmtier_integrations", "asyncio", "redis"}


def test_a_gpu_worker_gets_matches_without_tiers_or_metrics():
    code = "import sys, lmtier.core.match; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(out.stdout.split())
    of_core = {name for name in loaded if name.startswith("lmtier.core.")}
    assert of_core == {"lmtier.core.grant", "lmtier.core.match", "lmtier.core.placement"}
    assert not {name for name in loaded if name.startswith(("lmtier.tiers", "lmtier.observe", "prometheus"))}


def test_threads_live_in_one_module():
    users_of_threads = {path.name for _, path in SOURCES if "threading.Thread" in names(path)}
    assert users_of_threads == {"threads.py"}
    assert not users("concurrent") | users("multiprocessing")


def test_sizes_are_written_in_one_place():
    writers = [path.name for _, path in SOURCES if '"MiB"' in path.read_text()]
    assert writers == ["errors.py"]


def test_one_colour():
    assert not users("asyncio")
    assert not any(
        isinstance(node, ast.AsyncFunctionDef) for _, path in SOURCES for node in walked(tree(path))
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
        node.name for _, path in SOURCES for node in walked(tree(path)) if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name in classes if name.endswith(("Manager", "Helper", "Util", "Utils", "V2"))]


MEASURED = [
    *(path for _, path in SOURCES),
    *sorted((ROOT / "bench/lmtier_bench").rglob("*.py")),
]


def where(path):
    return path.relative_to(ROOT).as_posix()


def classes():
    """Each class of the source, with its number of lines."""
    for path in MEASURED:
        for node in walked(tree(path)):
            if isinstance(node, ast.ClassDef):
                yield node.name, (node.end_lineno or 0) - node.lineno + 1


def test_no_module_is_longer_than_700_lines():
    assert not [where(path) for path in MEASURED if len(path.read_text().splitlines()) > 700]


def test_no_class_is_longer_than_600_lines():
    assert not [name for name, lines in classes() if lines > 600]


def test_a_test_promises_in_50_characters():
    long = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^ *(?:async )?def test_(\w+)\(", path.read_text(), re.M)
        if len(name) > 50
    }
    assert not long, "a promise that one reads once"


def test_no_two_classes_have_one_name():
    often = Counter(name for name, _ in classes())
    assert not [name for name, times in often.items() if times > 1]


def test_lmtier_is_packages():
    assert len([path for path in CORE if path.parent == ROOTS["lmtier"] and path.stem[:2] != "__"]) <= 6


def test_a_lower_tiers_class_says_whether_it_has_an_index():
    """The index of a CUDA device, in copy/cuda/, is another thing."""
    asks = {where(path) for path in MEASURED if re.search(r"\bindex is (not )?None", path.read_text())}
    assert asks == {"lmtier/copy/cuda/device.py"}


def test_the_page_on_the_architecture_names_every_module():
    rows = re.findall(
        r"^\| `(\w+)/` \|.*\| (.*) \|$", (ROOT / "docs/ARCHITECTURE.md").read_text(), re.MULTILINE
    )
    drawn = {package: set(re.findall(r"`(\w+)/?`", modules)) for package, modules in rows}
    for package in drawn.keys() - {"backends", "integrations"}:
        folder = ROOTS["lmtier"] if package == "lmtier" else ROOTS["lmtier"] / package
        found = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
        if package != "lmtier":
            found |= {path.parent.name for path in folder.glob("*/__init__.py")}
        assert drawn[package] == found, package
    assert drawn.keys() >= {path.parent.name for path in ROOTS["lmtier"].glob("*/__init__.py")}
