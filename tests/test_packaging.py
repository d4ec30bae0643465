"""Three import packages in one wheel, a lazy registry, one command."""

import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import lmtier
from lmtier.errors import ConfigError
from lmtier.registry import BUILTIN, load_tier
from lmtier.tier import Tier

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_three_typed_packages_and_nothing_else(wheel):
    folders = {name.split("/")[0] for name in wheel.namelist()}
    metadata = f"lmtier-{lmtier.__version__}.dist-info"
    assert folders == {"lmtier", "lmtier_backends", "lmtier_integrations", metadata}
    for package in folders - {metadata}:
        assert f"{package}/py.typed" in wheel.namelist()


def test_the_wheel_holds_every_module_and_the_page(wheel):
    for root in ("lmtier", "backends/lmtier_backends", "integrations/lmtier_integrations"):
        for path in [*(ROOT / root).rglob("*.py"), *(ROOT / root).rglob("*.html")]:
            assert str(path.relative_to((ROOT / root).parent)) in wheel.namelist()


def test_the_wheel_brings_the_command_and_few_dependencies(wheel):
    info = f"lmtier-{lmtier.__version__}.dist-info"
    assert "lmtier = lmtier.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    needs = [
        line.removeprefix("Requires-Dist: ")
        for line in wheel.read(f"{info}/METADATA").decode().splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert sorted(need.split(">")[0] for need in needs) == ["numpy", "prometheus-client", "xxhash"]


def test_the_wheel_works_without_the_checkout(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = "import lmtier.cli, lmtier_backends.disk; raise SystemExit(lmtier.cli.main(['config']))"
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert (out.returncode, out.stderr) == (0, "")
    assert "chunk_tokens" in out.stdout


def test_metadata_matches_when_installed():
    try:
        installed = importlib.metadata.version("lmtier")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("running from a bare checkout")
    assert installed == lmtier.__version__


def test_constraints_pin_what_the_project_asks_for():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    groups = [PROJECT["project"]["dependencies"], PROJECT["dependency-groups"]["dev"]]
    groups += PROJECT["project"]["optional-dependencies"].values()
    for need in (need for group in groups for need in group):
        assert need.split(">")[0].lower() in pins


@pytest.mark.parametrize("scheme", sorted(BUILTIN))
def test_built_in_tiers_load_by_their_scheme(scheme):
    assert issubclass(load_tier(scheme), Tier)


def test_an_unknown_scheme_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'disk'"):
        load_tier("dsik")
