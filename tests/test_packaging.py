"""Three import packages in one wheel, a lazy registry, one command; all of it works with nothing else."""

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import lmtier
from lmtier.errors import ConfigError
from lmtier.tiers.base import Tier
from lmtier.tiers.registry import BUILTIN, load_tier
from tests.server.process import PATIENCE, Wire, until

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def build(source: Path, target: str, folder: Path) -> Path:
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory):
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(wheel_file):
    with zipfile.ZipFile(wheel_file) as archive:
        yield archive


def needed(requirements: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The distributions of these, and what they need in turn, but for extras."""
    for each in requirements:
        if "extra ==" not in each:
            found = importlib.metadata.distribution(re.split(r"[^\w.-]", each)[0])
            yield found
            yield from needed(found.requires or [])


@pytest.fixture(scope="module")
def empty(wheel_file, tmp_path_factory):
    """The programs of an environment with the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for each in needed(PROJECT["project"]["dependencies"]):
        here = Path(str(each.locate_file("")))
        for top in {file.parts[0] for file in each.files or () if file.parts[0] != ".."}:
            if top != "__pycache__" and not (packages / top).exists():
                (packages / top).symlink_to(here / top)
    install = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet"]
    install += ["--no-index", "--no-compile"]
    subprocess.run([*install, str(wheel_file)], check=True, capture_output=True)
    return folder / "bin"


def in_empty(empty: Path, folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{empty}:/usr/bin:/bin", "HOME": str(folder), **more}
    return subprocess.run(
        [str(empty / command[0]), *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_wheel_holds_only_three_typed_packages(wheel):
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
    assert "lmtier = lmtier.tools.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    needs = [
        line.removeprefix("Requires-Dist: ")
        for line in wheel.read(f"{info}/METADATA").decode().splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert sorted(need.split(">")[0] for need in needs) == ["numpy", "prometheus-client", "xxhash"]


def test_an_empty_environment_has_no_torch(empty, tmp_path):
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'transformers', 'pytest')])"
    done = in_empty(empty, tmp_path, "python", "-c", code)
    assert (done.returncode, done.stdout) == (0, "[None, None, None]\n"), done.stderr


def test_the_command_works_in_an_empty_environment(empty, tmp_path):
    for command, wanted in ((["--help"], "serve"), (["config"], "chunk_tokens")):
        done = in_empty(empty, tmp_path, "lmtier", *command)
        assert (done.returncode, done.stderr) == (0, "")
        assert wanted in done.stdout


def test_the_server_answers_in_an_empty_environment(empty, tmp_path):
    socket = tmp_path / "socket"
    command = [str(empty / "lmtier"), "serve", "--unix", str(socket), "--listen", "127.0.0.1:0"]
    command += ["--http", "127.0.0.1:0", "--tier", "cpu://?capacity=16MiB"]
    command += ["--tier", f"disk://{tmp_path}/kv?capacity=64MiB"]
    with (tmp_path / "log").open("wb") as log:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)

    def answers() -> bool:
        assert server.poll() is None, (tmp_path / "log").read_text()
        with suppress(OSError), Wire(str(socket)) as wire:
            return bool(wire.ask("PING") == "PONG")
        return False

    try:
        until(answers)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.wait()


def test_the_readmes_example_works_in_an_empty_environment(empty, tmp_path):
    """Its KV is numpy's here, of bf16's size. The second process finds on disk what the first one stored."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    head = "import logging, numpy as np\nlogging.basicConfig(level='INFO')\n"
    head += "kv = [np.ones((64, 2, 4, 128), np.uint16) for _ in range(2)]\n"
    for tokens, says in ((24, "24 out of 24"), (32, "8 out of 32")):
        request = f"prompt, blocks = list(range({tokens})), list(range({tokens // 4}))\n"
        code = f"{head}{request}{example}cache.close()\n"
        done = in_empty(empty, tmp_path, "python", "-c", code)
        assert done.returncode == 0, done.stderr
        assert f"Storing KV cache for {says} tokens" in done.stderr


def test_the_source_archive_makes_the_same_wheel(wheel, tmp_path):
    archive = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build(source, "wheel", tmp_path / "again")) as again:
        assert sorted(again.namelist()) == sorted(wheel.namelist())
        for name in wheel.namelist():
            assert again.read(name) == wheel.read(name), name


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
        assert re.split("[>=]", need)[0].lower() in pins


@pytest.mark.parametrize("scheme", sorted(BUILTIN))
def test_built_in_tiers_load_by_their_scheme(scheme):
    assert issubclass(load_tier(scheme), Tier)


def test_an_unknown_scheme_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'disk'"):
        load_tier("dsik")


def test_an_installation_prints_little_and_all_if_it_fails(wheel_file, tmp_path):
    index = tmp_path / "index" / "simple" / "lmtier"
    index.mkdir(parents=True)
    shutil.copy(wheel_file, index)
    (index / "index.html").write_text(f'<a href="{wheel_file.name}">{wheel_file.name}</a>')
    handler = partial(QuietHandler, directory=str(tmp_path / "index"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}

    def install(name: str) -> subprocess.CompletedProcess[str]:
        url = f"http://127.0.0.1:{server.server_port}/simple"
        options = ["--index-url", url, "--no-deps", "--no-cache-dir", "--target", str(tmp_path / "into")]
        return subprocess.run(
            [sys.executable, str(ROOT / ".ci" / "install.py"), *options, name],
            capture_output=True,
            text=True,
            env={**clean, "PIP_CONFIG_FILE": os.devnull},
        )

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            done, failed = install("lmtier"), install("lmtier-of-nobody")
        finally:
            server.shutdown()
            serving.join()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert re.fullmatch(r"  downloaded \d MB in 1 file\n", done.stderr)
    assert (tmp_path / "into" / "lmtier" / "_version.py").exists()
    assert failed.returncode == 1
    assert "No matching distribution found for lmtier-of-nobody" in failed.stderr


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """pytest takes what is said for a complaint."""
