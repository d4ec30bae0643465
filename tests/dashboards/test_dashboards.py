"""A real Prometheus scrapes a real server under load: every query of every dashboard and rule finds data."""

import json
import math
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml  # type: ignore[import-untyped]

from dashboards import build
from lmtier.client.client import Client
from lmtier.format.layout import form_of, padded
from lmtier.observe.metrics import Metrics
from lmtier.testing import opaque_layout
from tests.server.process import Served, until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BOARDS = sorted((ROOT / "dashboards/grafana").glob("*.json"))
PROMETHEUS = ROOT / "dashboards/prometheus"
LAYOUT = opaque_layout(8192)
FORM = form_of(LAYOUT, (LAYOUT.whole,))


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"this test needs {name}: apt-get install prometheus")
    return found


def board(name: str) -> Any:
    return json.loads((ROOT / f"dashboards/grafana/{name}.json").read_text())


def panels(path: Path) -> Any:
    return [each for each in json.loads(path.read_text())["panels"] if each["type"] != "row"]


def rules(name: str) -> Any:
    (group,) = yaml.safe_load((PROMETHEUS / f"{name}.yml").read_text())["groups"]
    return group["rules"]


# ---- what runs


class Load:
    """An engine that saves and looks up, more than fits, until told to stop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        dice = random.Random(1)
        chains = [[dice.randbytes(32) for _ in range(6)] for _ in range(20)]
        with Client(self._path) as client:
            while not self._stop.wait(0.005):
                keys = dice.choice(chains)
                match = client.wait(client.match(keys, FORM, tokens=len(keys) + 1))
                client.release(match)
                if match.chunks < len(keys):
                    reservation = client.reserve(keys, FORM)
                    if reservation.chunks:
                        client.commit(reservation)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Engine(BaseHTTPRequestHandler):
    """Says what a real vLLM said: first before, then after it was asked some prompts."""

    scrapes = 0

    def do_GET(self) -> None:
        Engine.scrapes += 1
        name = "before" if Engine.scrapes <= 3 else "after"
        text = (HERE / f"vllm-0.32-{name}.txt").read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


class Prometheus:
    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        settings = {
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
            "rule_files": [str(PROMETHEUS / "rules.yml"), str(PROMETHEUS / "alerts.yml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [target]}]}
                for job, target in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address={self.address}",
                ],
                stdout=log,
                stderr=log,
            )
        self._log = folder / "log"

    def get(self, path: str, **query: str) -> Any:
        with urlopen(f"http://{self.address}/api/v1/{path}?{urlencode(query)}", timeout=10) as reply:
            return json.load(reply)["data"]

    def ask(self, expr: str) -> Any:
        return self.get("query", query=expr)["result"]

    def is_up(self, job: str) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-3000:]
        try:
            found = self.ask(f'count_over_time(up{{job="{job}"}}[1m]) > 8 and up == 1')
        except OSError:
            return False
        return bool(found)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("watched")
    server = Served(
        folder,
        f"cpu://?capacity={24 * padded(8192)}",
        f"disk://{folder}/disk?capacity={60 * FORM.stored_bytes}",
        config={"chunk_tokens": 1},
        unix=str(folder / "socket"),
        http="127.0.0.1:0",
    )
    engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=engine.serve_forever).start()
    load = Load(server.where["unix"])
    (folder / "prometheus").mkdir()
    targets = {"lmtier": server.where["http"], "vllm": f"127.0.0.1:{engine.server_port}"}
    watcher = Prometheus(folder / "prometheus", targets)
    try:
        until(lambda: watcher.is_up("lmtier") and watcher.is_up("vllm"), 60)
        until(lambda: watcher.ask("instance_tier:lmtier_dropped_tokens:rate5m"), 60)
        yield watcher
    finally:
        watcher.stop()
        load.stop()
        server.kill()
        engine.shutdown()
        engine.server_close()


def found(prometheus: Prometheus, expr: str) -> Any:
    """The samples that are numbers. After a scrape that came too late there are none for a moment."""
    end = time.monotonic() + 10
    while True:
        result = prometheus.ask(expr)
        numbers = [each for each in result if math.isfinite(float(each["value"][1]))]
        if numbers or time.monotonic() > end:
            return numbers
        time.sleep(0.1)  # Prometheus scrapes again soon


def filled_in(expr: str) -> str:
    """As Grafana does, when all is chosen."""
    for name, value in {
        "$__rate_interval": "1m",
        "$__range": "1m",
        **dict.fromkeys(("$instance", "$tier", "$model"), ".*"),
    }.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    return expr


# ---- queries


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_panel_finds_data(prometheus, path):
    silent = []
    for panel in panels(path):
        for target in panel["targets"]:
            samples = found(prometheus, filled_in(target["expr"]))
            labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            if not samples or not all(label in each["metric"] for each in samples for label in labels):
                silent.append((panel["title"], target["expr"], samples[:1]))
    assert not silent


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_variable_has_a_value_to_choose(prometheus, path):
    for each in json.loads(path.read_text())["templating"]["list"][1:]:
        ((series, label),) = re.findall(r"^label_values\((.+), (\w+)\)$", each["query"]["query"])
        assert found(prometheus, f"count by ({label}) ({filled_in(series)})")


def test_every_rule_has_data_to_judge(prometheus):
    for rule in rules("rules"):
        assert found(prometheus, rule["record"]), rule["record"]
    for rule in rules("alerts"):
        judged = re.split(r" (?:==|<|>) [\d.]+(?: and |$)", rule["expr"])[0]
        assert judged != rule["expr"]
        assert found(prometheus, judged), rule["alert"]


def test_prometheus_evaluates_every_rule(prometheus):
    written = [each for name in ("rules", "alerts") for each in rules(name)]

    def evaluated():
        running = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        return len(running) == len(written) and all(rule["health"] == "ok" for rule in running)

    until(evaluated)


def test_the_server_is_not_in_alarm(prometheus):
    assert not prometheus.ask('ALERTS{alertstate="firing"}')


def test_what_a_server_exposes_is_well_formed_and_declared(prometheus):
    target = prometheus.ask('up{job="lmtier"}')[0]["metric"]["instance"]
    with urlopen(f"http://{target}/metrics", timeout=10) as reply:
        text = reply.read()
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    families = {line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE lmtier_")}
    declared = {each.name for each in Metrics().declared}
    assert {name for name in families if not name.endswith("_created")} == declared


# ---- files


def finds_0(folder: Path, expr: str, series: dict[str, str]) -> None:
    """promtool: after five minutes of these series the query finds one number, 0."""
    test = {
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": filled_in(expr), "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": 0}]}
        ],
    }
    (folder / "test.yml").write_text(yaml.safe_dump({"tests": [{"interval": "1m"} | test]}))
    promtool(folder / "test.yml")


def promtool(tests: Path) -> None:
    checked = subprocess.run(
        [program("promtool"), "test", "rules", str(tests)], capture_output=True, timeout=60, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_server_that_is_down_is_shown_as_not_ready(tmp_path):
    (panel,) = [each for each in panels(BOARDS[0].with_stem("overview")) if each["title"] == "Ready"]
    labels = 'job="lmtier", instance='
    series = {f'up{{{labels}"a"}}': "1x5", f'lmtier_ready{{{labels}"a"}}': "1x5", f'up{{{labels}"b"}}': "0x5"}
    finds_0(tmp_path, panel["targets"][0]["expr"], series)


def test_alerts_fire_when_they_should():
    promtool(HERE / "alerts_test.yml")
    tested = (HERE / "alerts_test.yml").read_text()
    for rule in rules("alerts"):
        assert f'alertname="{rule["alert"]}"' in tested


@pytest.mark.parametrize("path", build.generated_files())
def test_what_is_generated_is_not_stale(path):
    assert (ROOT / path).read_text() == build.generated_files()[path], "run python dashboards/build.py"


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_laid_out_for_any_data_source(path):
    board = json.loads(path.read_text())
    assert board["uid"] == f"lmtier-{path.stem}"
    assert board["templating"]["list"][0]["type"] == "datasource"
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"])
    for one, other in combinations([each["gridPos"] for each in board["panels"]], 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    for panel in panels(path):
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert "rate(" not in target["expr"] or "[$__rate_interval]" in target["expr"]


def test_the_overview_follows_the_five_questions():
    rows = [each["title"] for each in board("overview")["panels"] if each["type"] == "row"]
    assert rows == [
        "Is it working?",
        "What does it save me?",
        "Why was that a miss?",
        "Is it the bottleneck?",
        "Should I buy more memory?",
    ]


def test_the_files_to_provision_are_where_the_page_says():
    page = (ROOT / "docs/DASHBOARDS.md").read_text()
    for path in [*(ROOT / "dashboards").rglob("*.json"), *(ROOT / "dashboards").rglob("*.yml")]:
        assert path.name in page or str(path.parent.relative_to(ROOT)) in page
        if path.suffix == ".yml":
            yaml.safe_load(path.read_text())
