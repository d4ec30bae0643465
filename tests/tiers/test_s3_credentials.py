"""Keys to a bucket are found where Amazon's own tools find them, and renewed before they end."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import pytest

from lmtier_backends.s3.credentials import Credentials, profile_of
from lmtier_backends.s3.signing import EMPTY, AccessKey, query_of, quoted, sign


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """No settings but those of the test."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def keys(credentials: Credentials | None = None, seconds: float = 5.0) -> AccessKey:
    return (credentials or Credentials("", "eu-central-1")).access_key(time.monotonic() + seconds)


class Service:
    """An HTTP service on this host that answers from `said`, by method and path, and notes the headers."""

    def __init__(self) -> None:
        self.said: dict[str, str | Callable[[], str]] = {}
        self.asked: list[tuple[str, dict[str, str], str]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                what = f"{self.command} {self.path}"
                service.asked.append((what, dict(self.headers), body))
                text = service.said.get(what)
                self.send_response(404 if text is None else 200)
                self.end_headers()
                self.wfile.write((text() if callable(text) else text or "").encode())

            do_GET = do_PUT = do_POST = _any

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    thread = threading.Thread(target=service.http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield service
    service.http.shutdown()
    service.http.server_close()
    thread.join(10)


def temporary(number: int, seconds: float, token: str = "Token") -> str:
    ends = datetime.fromtimestamp(time.time() + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return json.dumps(
        {"AccessKeyId": f"id{number}", "SecretAccessKey": "s", token: f"t{number}", "Expiration": ends}
    )


def test_a_profile_beats_variables_and_those_beat_files(home, monkeypatch):
    (home / "credentials").write_text("[work]\naws_access_key_id = file\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    assert keys() == AccessKey("id", "hunter2", "token")
    assert "hunter2" not in repr(keys())
    assert keys(Credentials("work", "")).id == "file"


def test_files_have_profiles_and_are_read_again_on_refusal(home, monkeypatch):
    (home / "config").write_text("[default]\nregion = eu-north-1\n[profile work]\nregion = eu-west-3\n")
    (home / "credentials").write_text(
        "[default]\naws_access_key_id = one\naws_secret_access_key = s\n"
        "[work]\naws_access_key_id = two\naws_secret_access_key = s\naws_session_token = t\n"
    )
    credentials = Credentials("", "")
    assert keys(credentials).id == "one"
    assert profile_of("")["region"] == "eu-north-1"
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert keys() == AccessKey("two", "s", "t")
    assert profile_of("")["region"] == "eu-west-3"
    assert keys(credentials).id == "one"  # not yet
    credentials.refused(keys(credentials))
    assert keys(credentials).id == "two"


def test_a_command_may_print_them(home):
    script = home / "script.py"
    script.write_text(f"print({temporary(1, 3600, 'SessionToken')!r})")
    (home / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    assert (keys().id, keys().token) == ("id1", "t1")
    (home / "config").write_text("[default]\ncredential_process = /nowhere/command\n")
    with pytest.raises(ConnectionError, match="/nowhere/command"):
        keys()
    script.write_text("print([])")
    (home / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    with pytest.raises(ConnectionError, match="credentials: "):
        keys()


def test_unreadable_settings_are_a_failure_that_can_end(home):
    (home / "config").write_bytes(b"\xff\xfe")
    with pytest.raises(ConnectionError, match="credentials: "):
        profile_of("")


def test_keys_of_a_containers_role_are_renewed_in_time(home, service, monkeypatch):
    numbers = iter(range(100))
    service.said["GET /role"] = lambda: temporary(next(numbers), 301.0)
    (home / "token").write_text("let me in\n")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.url}/role")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(home / "token"))
    credentials = Credentials("", "")
    assert keys(credentials).id == "id0"
    assert service.asked[0][1]["Authorization"] == "let me in"
    deadline = time.monotonic() + 10
    while keys(credentials).id == "id0":  # five minutes before their end: now
        assert time.monotonic() < deadline
    del service.said["GET /role"]
    credentials.refused(keys(credentials))
    assert keys(credentials).id == "id1"  # the service is away; these are still good


def test_an_instance_has_a_role_and_is_asked_with_a_token(service, monkeypatch):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
    role = "/latest/meta-data/iam/security-credentials/"
    service.said |= {
        "PUT /latest/api/token": "a token",
        f"GET {role}": "cache-host",
        f"GET {role}cache-host": temporary(7, 3600),
    }
    assert (keys().id, keys().token) == ("id7", "t7")
    assert [asked[1].get("X-aws-ec2-metadata-token") for asked in service.asked[1:3]] == ["a token"] * 2


def test_missing_credentials_are_asked_for_once_a_minute(service, monkeypatch):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
    credentials = Credentials("", "")
    for _ in range(5):
        with pytest.raises(ConnectionError, match="no credentials"):
            keys(credentials)
    assert len(service.asked) == 1


def test_a_service_account_gets_the_keys_of_its_role(home, service, monkeypatch):
    (home / "identity").write_text("a signed statement")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(home / "identity"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/cache")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service.url)
    service.said["POST /"] = (
        "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
        "<AccessKeyId>id</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
        "<Expiration>2999-01-01T00:00:00Z</Expiration>"
        "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )
    assert (keys().id, keys().token) == ("id", "t")
    assert "WebIdentityToken=a+signed+statement" in service.asked[0][2]
    assert "RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fcache" in service.asked[0][2]


@pytest.mark.parametrize("token", ["", "a token"])
def test_a_signature_is_the_one_that_amazons_client_makes(monkeypatch, token):
    now = datetime(2026, 11, 24, 13, 36, 14, tzinfo=UTC)
    path, query = (
        quoted("/bucket/a b+c/ä~(1).L0-1H0-1"),
        query_of({"list-type": "2", "prefix": "a/ b&=", "delete": ""}),
    )
    theirs = botocore.awsrequest.AWSRequest(
        "GET", f"http://host:9000{path}?{query}", headers={"Range": "bytes=0-4095"}
    )
    theirs.context["timestamp"] = now.strftime("%Y%m%dT%H%M%SZ")
    auth: Any = botocore.auth.S3SigV4Auth(
        botocore.credentials.Credentials("id", "secret", token or None), "s3", "eu-central-1"
    )
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda *_: now.replace(tzinfo=None), raising=False
    )
    auth.add_auth(theirs)
    headers = {"Host": "host:9000", "Range": "bytes=0-4095"}
    ours = sign(
        "GET", path, query, headers, EMPTY, AccessKey("id", "secret", token), "eu-central-1", now.timestamp()
    )
    assert ours["authorization"] == theirs.headers["Authorization"]
