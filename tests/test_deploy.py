"""Files of deploy/: the properties that the documentation promises, and agreement with the server's options and limits.

No image is built here: the Dockerfile was linted with hadolint, compose.yaml validated with its JSON schema.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.server import byte_checkpoint, start_server
from typer.main import get_command

from cutaway.cli import app
from cutaway.serve.limits import Limits

pytestmark = pytest.mark.unchecked
DEPLOY = Path(__file__).parents[1] / "deploy"


@pytest.fixture(scope="module")
def service() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["cutaway"]


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, without comments and with continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def serve_options() -> set[str]:
    verb = get_command(app).get_command(None, "serve")  # type: ignore[attr-defined]
    return {flag for parameter in verb.params for flag in parameter.opts}


def test_image_runs_as_a_user_without_rights(instructions: list[tuple[str, str]]) -> None:
    stages = "\n".join(f"{name} {rest}" for name, rest in instructions).split("FROM ")[1:]
    assert [re.split(r"\sAS\s", stage.splitlines()[0])[-1] for stage in stages] == [
        "build",
        "runtime",
        "gpu",
        "runtime",
    ]
    assert len({stage.splitlines()[0].split()[0] for stage in stages[:2]}) == 1  # one slim base image
    assert "-slim-" in stages[0].splitlines()[0]
    for stage in stages[1:3]:
        users = re.findall(r"(?m)^USER (.*)$", stage)
        assert users[-1] == "10001:10001"
    assert "COPY --from=build /opt/cutaway" in stages[1]
    assert not re.search(r"COPY (?!--from=build)", stages[1])
    assert not [rest for name, rest in instructions if name == "ADD"]
    secrets = [rest for name, rest in instructions if name in ("ENV", "ARG") and re.search(r"KEY|TOKEN|SECRET", rest)]
    assert not secrets


def test_image_copies_what_the_build_needs_and_nothing_else(instructions: list[tuple[str, str]]) -> None:
    allowed = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    copies = [rest.split()[:-1] for kind, rest in instructions if kind == "COPY" and "--from" not in rest]
    copied = {name for names in copies for name in names}
    assert copied == allowed
    assert all((DEPLOY.parent / name).exists() for name in copied)


def test_commands_use_options_of_the_server(instructions: list[tuple[str, str]], service: Any) -> None:
    entrypoint = json.loads(dict(instructions)["ENTRYPOINT"])
    unit = parse_unit()["Service"]["ExecStart"][0]
    for words in (entrypoint, service["command"], shlex.split(unit)):
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options
        assert options <= serve_options()
    assert entrypoint[:4] == ["cutaway", "serve", "--host", "0.0.0.0"]


def test_health_checks_succeed_while_the_engine_runs(instructions: list[tuple[str, str]], service: Any) -> None:
    check = dict(instructions)["HEALTHCHECK"].partition("CMD ")[2]
    command = json.loads(check)
    assert ["CMD", *command] == service["healthcheck"]["test"]
    assert command[:2] == ["python", "-c"]

    with start_server(byte_checkpoint("tiny-llama")) as server:

        def exit_code() -> int:
            code = command[2].replace(":8000", f":{server.port}")
            assert code != command[2]
            return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode

        assert exit_code() == 0
        server.engine.close()
        assert exit_code() != 0


def test_compose_service_is_locked_down(service: Any) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == "10001:10001"
    assert all("noexec" in mount and mount.startswith("/tmp:size=") for mount in service["tmpfs"])
    assert all(volume["read_only"] for volume in service["volumes"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "environment" not in service  # keys are a secret, not a variable
    assert service["secrets"] == ["api_keys"]
    assert "--api-keys=/run/secrets/api_keys" in service["command"]
    shutdown = next(word for word in service["command"] if word.startswith("--shutdown-timeout="))
    assert int(shutdown.partition("=")[2]) < int(service["stop_grace_period"].removesuffix("s"))


def parse_unit() -> dict[str, dict[str, list[str]]]:
    sections: dict[str, dict[str, list[str]]] = {}
    for line in (DEPLOY / "cutaway.service").read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            section.setdefault(name, []).append(value)
    return sections


def test_systemd_unit_is_hardened() -> None:
    unit = parse_unit()["Service"]
    for name in (
        "NoNewPrivileges", "PrivateDevices", "PrivateTmp", "ProtectClock", "ProtectControlGroups", "ProtectHome",
        "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "LockPersonality",
        "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID",
    ):  # fmt: skip
        assert unit[name] == ["yes"], name
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["CapabilityBoundingSet"] == unit["AmbientCapabilities"] == [""]
    assert unit["User"] == ["cutaway"]
    assert "MemoryDenyWriteExecute" not in unit  # PyTorch generates machine code
    assert "-HUP" in unit["ExecReload"][0]
    timeout = re.search(r"--shutdown-timeout (\d+)", unit["ExecStart"][0])
    assert timeout is not None
    assert int(timeout[1]) < int(unit["TimeoutStopSec"][0])


def test_proxies_stream_and_wait_longer_than_the_server() -> None:
    limits, nginx, caddy = Limits(), (DEPLOY / "nginx.conf").read_text(), (DEPLOY / "Caddyfile").read_text()
    assert "proxy_buffering off;" in nginx
    assert "flush_interval -1" in caddy
    assert "proxy_set_header Host $host;" in nginx
    assert "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;" in nginx
    options = {nginx: ("proxy_read_timeout", "keepalive_timeout"), caddy: ("response_header_timeout", "keepalive")}
    for text, names in options.items():
        read_timeout, keep_alive = (int(re.findall(rf"\b{name} (\d+)s", text)[0]) for name in names)
        assert read_timeout > limits.request_timeout + 10
        assert keep_alive < limits.keep_alive_timeout
    assert re.findall(r"client_max_body_size (\d+)m", nginx) == re.findall(r"max_size (\d+)MiB", caddy) == ["2"]
    assert limits.max_body_bytes == 2 * 2**20


def test_dashboard_uses_metrics_that_the_server_exports() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    used = set(re.findall(r"\b(?:cutaway|process)_[a-z0-9_]+", "\n".join(expressions)))
    with start_server(byte_checkpoint("tiny-llama")) as server:
        server.request("POST", "/v1/completions", '{"prompt": "a"}', {"Content-Type": "application/json"})
        exported = set(re.findall(r"(?m)^[a-z0-9_]+", server.request("GET", "/metrics")[2].decode()))
    assert len(used) > 8
    assert used <= exported
