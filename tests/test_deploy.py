"""What deploy/ tells others to run agrees with lmtier, with systemd, and with the schemas of Kubernetes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any, cast

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

import lmtier
from lmtier.config import Config, ServerConfig, TierSpec, host_and_port, load, load_server, parse_size
from lmtier.core.cache import Cache
from lmtier.observe.metrics import Metrics
from lmtier.server.access import RIGHTS, Role, RoleTokens, WrongTokens
from lmtier.server.engines import EngineVerbs
from lmtier.server.http import routes
from lmtier.server.listening import check_exposure
from lmtier.server.redis import redis_table
from lmtier.server.redis.service import ServerCommands
from lmtier.server.transactions import Transactions
from lmtier.tools.cli import main

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.30"  # and the newest that the schemas know
ENOUGH = 4 << 30  # bytes beside the slab: the index of a million chunks, sockets, Python


def settings(file: Path) -> tuple[Config, ServerConfig]:
    return load(file, {})[0], load_server(file, {})[0]


def slowest_stop(serving: ServerConfig) -> float:
    """Connections may take `grace`, what waits to be written as long again, and a little."""
    return 2 * serving.grace + 2


def disks(config: Config) -> list[PurePosixPath]:
    return [PurePosixPath(spec.location) for spec in config.all_tiers if spec.scheme == "disk"]


# ---- systemd


def unit() -> dict[str, list[str]]:
    """The settings of [Service]."""
    found: dict[str, list[str]] = {}
    _, _, service = (DEPLOY / "lmtier.service").read_text().partition("[Service]\n")
    for name, value in re.findall(r"^(\w+)=(.*)$", service.partition("\n[")[0], re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def unit_file(tmp_path: Path) -> Path:
    """The unit as it is on a machine where lmtier is installed."""
    if shutil.which("systemd-analyze") is None:
        pytest.fail("this test asks systemd: apt-get install systemd")
    program = tmp_path / "lmtier"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEPLOY / "lmtier.service").read_text()
    file = tmp_path / "lmtier.service"
    file.write_text(text.replace("/opt/lmtier/bin/lmtier", str(program)))
    assert str(program) in file.read_text()
    return file


def test_systemd_finds_nothing_wrong_with_the_unit(unit_file):
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit_file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_calls_the_service_safe(unit_file):
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", str(unit_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:]


def test_the_units_filter_allows_the_servers_calls():
    allowed: set[str] = set()
    for line in unit()["SystemCallFilter"]:
        named = system_calls(line.lstrip("~"))
        allowed = allowed - named if line.startswith("~") else allowed | named
    needed = {"memfd_create", "eventfd2", "epoll_wait", "madvise", "mmap", "mremap", "ftruncate", "flock"}
    needed |= {
        "sendmsg",
        "recvmsg",
        "setrlimit",
        "prlimit64",
        "prctl",
        "fallocate",
        "fsync",
        "rename",
        "clone3",
        "futex",
    }
    assert needed <= allowed


def system_calls(group: str) -> set[str]:
    """What systemd takes a name in a filter for."""
    if not group.startswith("@"):
        return {group}
    done = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager", group], capture_output=True, text=True, check=True
    )
    lines = [line.strip() for line in done.stdout.splitlines()[1:]]
    return {each for line in lines if line and not line.startswith("#") for each in system_calls(line)}


def test_the_unit_serves_the_example_with_time_and_files():
    service = unit()
    config, serving = settings(DEPLOY / "lmtier.toml")
    assert service["ExecStart"] == ["/opt/lmtier/bin/lmtier serve --config /etc/lmtier/lmtier.toml"]
    assert int(service["TimeoutStopSec"][0]) > slowest_stop(serving)
    assert int(service["LimitNOFILE"][0]) >= serving.clients + 256
    assert int(service["RestartPreventExitStatus"][0]) == 2
    assert PurePosixPath(serving.unix).parent == PurePosixPath("/run") / service["RuntimeDirectory"][0]
    (disk,) = disks(config)
    assert PurePosixPath("/var/lib") / service["StateDirectory"][0] in disk.parents


def test_the_example_differs_from_defaults_only_as_it_says():
    _, serving = settings(DEPLOY / "lmtier.toml")
    assert serving == ServerConfig(unix="/run/lmtier/socket")
    check_exposure(serving, RoleTokens({}))


def test_commented_lines_of_the_example_are_settings_too(tmp_path):
    text = re.sub(r"^# (\w+ = )", r"\1", (DEPLOY / "lmtier.toml").read_text(), flags=re.MULTILINE)
    file = tmp_path / "lmtier.toml"
    file.write_text(text)
    config, serving = settings(file)
    assert (config.chunk_tokens, serving.grace) == (Config().chunk_tokens, ServerConfig().grace)
    assert (serving.token_file, bool(serving.tls_ca)) == ("/etc/lmtier/token", True)


def test_the_example_is_shown_by_config(capsys, monkeypatch):
    monkeypatch.delenv("LMTIER_TOKEN", raising=False)
    assert main(["config", "--config", str(DEPLOY / "lmtier.toml")]) == 0
    assert "/run/lmtier/socket" in capsys.readouterr().out


# ---- Kubernetes


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def the(kind: str) -> Any:
    (found,) = [each for each in documents("daemonset.yaml") if each["kind"] == kind]
    return found


POD = the("DaemonSet")["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
VOLUMES = {each["name"]: each for each in POD["volumes"]}
MOUNTS = {each["name"]: PurePosixPath(each["mountPath"]) for each in SERVER["volumeMounts"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, ServerConfig]:
    """The settings that the ConfigMap gives."""
    ((name, text),) = the("ConfigMap")["data"].items()
    file = tmp_path_factory.mktemp("config") / name
    file.write_text(text)
    assert SERVER["args"] == ["--config", str(MOUNTS["config"] / name)]
    return settings(file)


@pytest.mark.parametrize("version", [KUBERNETES, kubernetes_validate.latest_version()])
def test_kubernetes_takes_every_document_to_the_letter(version):
    kinds = []
    for document in documents("daemonset.yaml"):
        kubernetes_validate.validate(document, version, strict=True)
        kinds.append(document["kind"])
    assert kinds == ["Namespace", "Secret", "ConfigMap", "DaemonSet", "Service", "NetworkPolicy"]


def test_the_schemas_would_find_a_misspelt_word():
    document = the("DaemonSet")
    document["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_ports_are_those_that_the_server_listens_on(served):
    _, serving = served
    ports = {each["name"]: each["containerPort"] for each in SERVER["ports"]}
    assert ports == {
        "redis": host_and_port(serving.listen, "")[1],
        "http": host_and_port(serving.http, "")[1],
    }
    assert ports == {
        "redis": host_and_port(ServerConfig().listen, "")[1],
        "http": host_and_port(ServerConfig().http, "")[1],
    }
    assert {each["targetPort"]: each["port"] for each in the("Service")["spec"]["ports"]} == ports
    policy = the("NetworkPolicy")["spec"]["ingress"]
    assert {port["port"] for rule in policy for port in rule["ports"]} == set(ports)
    notes = the("DaemonSet")["spec"]["template"]["metadata"]["annotations"]
    assert (int(notes["prometheus.io/port"]), notes["prometheus.io/path"]) == (ports["http"], "/metrics")


def test_probes_ask_for_what_needs_no_token():
    paths = {SERVER[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
    assert paths == {"/healthz", "/readyz"}
    assert {RIGHTS[path].role for path in paths} == {Role.NONE}


def test_the_server_has_a_token_and_may_face_other_hosts(served):
    _, serving = served
    token = PurePosixPath(serving.token_file)
    assert token.parent == MOUNTS["token"]
    secret = the("Secret")
    assert VOLUMES["token"]["secret"]["secretName"] == secret["metadata"]["name"]
    check_exposure(serving, RoleTokens({Role.ENGINE: secret["stringData"][token.name]}))


def test_every_path_of_the_settings_is_a_writable_mount(served):
    config, serving = served
    writable = {each["mountPath"] for each in SERVER["volumeMounts"] if not each.get("readOnly")}
    assert str(PurePosixPath(serving.unix).parent) in writable
    (disk,) = disks(config)
    assert str(disk.parent) in writable
    (init,) = POD["initContainers"]
    assert {each["mountPath"] for each in init["volumeMounts"]} == writable
    script = " ".join(init["args"])
    assert all(f" {path}" in script for path in writable)
    for path in MOUNTS.values():  # a read-only volume has no place for another
        assert not set(path.parents) & set(MOUNTS.values())


def test_memory_is_the_slab_and_enough_beside_it(served):
    config, _ = served
    slab = config.all_tiers[0].capacity
    assert slab is not None
    for which in ("requests", "limits"):
        assert parse_size(SERVER["resources"][which]["memory"] + "B") >= slab + ENOUGH


def test_it_is_given_time_to_stop(served):
    _, serving = served
    assert POD["terminationGracePeriodSeconds"] > slowest_stop(serving)


def test_the_server_is_nobody_and_may_nothing():
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert SERVER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    (init,) = POD["initContainers"]
    assert init["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}


def test_images_are_of_this_version():
    images = {each["image"] for each in (*POD["containers"], *POD["initContainers"])}
    assert images == {f"lmtier:{lmtier.__version__}"}


def test_the_pod_monitor_scrapes_this_pod_with_this_token():
    (monitor,) = documents("podmonitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert monitor["spec"]["selector"] == the("DaemonSet")["spec"]["selector"]
    assert monitor["metadata"]["namespace"] == the("DaemonSet")["metadata"]["namespace"]
    assert endpoint["port"] in {each["name"] for each in SERVER["ports"]}
    credentials = endpoint["authorization"]["credentials"]
    assert credentials == {"name": the("Secret")["metadata"]["name"], "key": "token"}


# ---- the image


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


def test_what_the_image_copies_is_enough_to_build_lmtier(tmp_path):
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    for words in re.findall(r"^COPY (?!--from)(.*)$", dockerfile(), re.MULTILINE):
        *sources, target = words.split()
        for source in sources:
            into = tmp_path / target / ("" if target != "./" else source)
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, into)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", "out"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert len(list((tmp_path / "out").glob("lmtier-*.whl"))) == 1


def test_the_image_serves_as_the_user_that_kubernetes_names():
    assert 'ENTRYPOINT ["lmtier", "serve"]' in dockerfile()
    context = POD["securityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}" in dockerfile()
    assert context["runAsUser"] == context["fsGroup"] != 0


# ---- compose

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]


def test_compose_starts_a_server_that_its_check_finds(tmp_path):
    """The very words of both files, but for the places."""
    words = [word.replace("/run/lmtier", str(tmp_path)) for word in COMPOSE["lmtier"]["command"]]
    words = [word.replace("/var/lib/lmtier", str(tmp_path)).replace("4GiB", "64MiB") for word in words]
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (.*)$", dockerfile(), re.MULTILINE)
    ping = [word.replace("/run/lmtier", str(tmp_path)) for word in json.loads(check)]
    python = [sys.executable, "-P", "-m"]
    elsewhere = ["--listen", "", "--http", "127.0.0.1:0"]  # ports of this machine may be taken
    command = [*python, "lmtier", "serve", *words, *elsewhere]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert any("listens" in line for line in server.stdout)
        subprocess.run([*python, *ping], check=True, timeout=30)
        server.terminate()
        assert server.wait(30) == 0


def test_the_engine_of_compose_finds_its_server():
    engine = COMPOSE["vllm"]
    (given,) = [word for word in engine["command"] if word.startswith("--kv-transfer-config=")]
    extra = json.loads(given.partition("=")[2])["kv_connector_extra_config"]
    assert f"--unix={extra['server']}" in COMPOSE["lmtier"]["command"]
    block = int(next(word for word in engine["command"] if "block-size" in word).partition("=")[2])
    assert f"--set=chunk_tokens={block}" in COMPOSE["lmtier"]["command"]
    assert "socket:/run/lmtier" in engine["volumes"]
    assert "socket:/run/lmtier" in COMPOSE["lmtier"]["volumes"]


def test_both_images_run_as_one_user():
    users = {
        re.findall(r"^USER (.*)$", (DEPLOY / name).read_text(), re.MULTILINE)[-1]
        for name in ("Dockerfile", "vllm.Dockerfile")
    }
    assert len(users) == 1


def test_compose_gives_memory_for_the_slab_and_enough_more():
    (slab,) = re.findall(r"cpu://\?capacity=(\w+)", " ".join(COMPOSE["lmtier"]["command"]))
    assert parse_size(COMPOSE["lmtier"]["mem_limit"].replace("g", "GiB")) >= parse_size(slab) + ENOUGH


def test_what_compose_mounts_and_builds_exists():
    for service in COMPOSE.values():
        for volume in service.get("volumes", ()):
            if (source := volume.partition(":")[0]).startswith(".."):
                assert (DEPLOY / source).exists(), source
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()


# ---- the words


def test_the_document_lists_every_setting_with_its_default():
    text = (ROOT / "docs/SERVER.md").read_text()
    for name, value in ((each, getattr(ServerConfig(), each)) for each in ServerConfig.__dataclass_fields__):
        row = re.search(rf"^\| `{name}` \| (.*?) \|", text, re.MULTILINE)
        assert row, f"{name} is not in the table"
        shown = {"": "none", "False": "false"}.get(str(value), str(value).removesuffix(".0"))
        assert row[1].strip("`") == shown, name


def test_the_document_lists_exactly_the_redis_commands():
    (block,) = re.findall(r"## For Redis clients\n\n`([A-Z\s]+)`", (ROOT / "docs/SERVER.md").read_text())
    service = ServerCommands(
        tokens=lambda: RoleTokens({}),
        wrong=WrongTokens(Metrics()),
        info=dict,
        settings=dict,
        present=list,
        kill=bool,
    )
    known = {**redis_table(cast(Any, None), service), **Transactions(cast(Any, None)).table()}
    assert sorted(block.split()) == sorted(name.decode() for name in known)


def test_the_document_lists_every_page():
    text = (ROOT / "docs/SERVER.md").read_text().partition("## For HTTP")[2].partition("\n## ")[0]
    listed = {
        path
        for row in re.findall(r"^\| (`/.*?) \|", text, re.MULTILINE)
        for path in re.findall(r"`(/.*?)`", row)
    }
    pages = routes(cast(Any, None), cast(Any, None))
    assert listed == pages.keys()


def test_the_document_lists_every_call_with_its_arguments():
    text = (ROOT / "docs/SERVER.md").read_text().partition("## Calls")[2].partition("\n## ")[0]
    listed = {
        path: (method, re.findall(r"`(\w+)`", arguments), role)
        for method, path, arguments, role in re.findall(
            r"^\| `(\w+) (/api/\w+)` \|(.*?)\| .* \| (\w+) \|$", text, re.MULTILINE
        )
    }
    with Cache(Config(tiers=("cpu://?capacity=1MiB",), prefault=False)) as cache:
        calls = EngineVerbs(cache).api.calls
    assert listed == {
        path: (call.method, list(call.arguments), RIGHTS[path].role.name.lower())
        for path, call in calls.items()
    }


def test_the_document_links_to_what_exists():
    text = (ROOT / "docs/SERVER.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link


def test_tiers_in_the_document_are_tiers():
    text = (ROOT / "docs/SERVER.md").read_text()
    urls = re.findall(r"['\"]((?:cpu|disk)://[^'\"]*)['\"]", text)
    assert len(urls) > 2
    assert all(TierSpec.parse(url).capacity for url in urls)
