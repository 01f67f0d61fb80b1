"""The systemd unit, the Dockerfile and the Kubernetes manifests say what the bridge does: its flags, ports and times."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from bridge.flags import SERVE, resolve
from bridge.supervisor.errors import EXIT_USAGE

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
UNIT = EXAMPLES / "systemd/headless-bridge.service"
PROBES = {"/livez", "/readyz"}


def settings(environment: dict[str, str], *arguments: str) -> Any:
    """What `serve` makes of an environment; every BRIDGE_ name in it is a flag's."""
    ours = {name for name in environment if name.startswith("BRIDGE_")}
    assert ours <= {flag.env for flag in SERVE}, "a name that no flag has"
    return resolve(SERVE, arguments, environment, "vllm")


def unit() -> dict[str, list[str]]:
    """The unit's settings by name."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_names_flags_that_exist_and_leaves_time_to_stop() -> None:
    found = unit()
    environment = dict(pair.split("=", 1) for line in found["Environment"] for pair in line.split())
    values = settings(environment)
    assert values["metrics_port"] == 9090 and values["log_format"] == "json"
    assert values["stop_secs"] < float(found["TimeoutStopSec"][0])
    assert found["Type"] == ["notify"] and found["KillMode"] == ["mixed"]
    assert found["RestartPreventExitStatus"] == [str(EXIT_USAGE)]
    assert found["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """By systemd's own check where it is installed, by the form of its lines elsewhere."""
    text = UNIT.read_text()
    assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == ["Unit", "Service", "Install"]
    assert all(re.match(r"(#.*|\[\w+\]|[A-Z]\w+=.+)?$", line) for line in text.splitlines())
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        copy = tmp_path / UNIT.name
        copy.write_text(text.replace("/opt/headless-bridge/bin/headless-bridge", sys.executable))
        done = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True, timeout=60)
        complaints = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
        assert complaints == []


def test_the_image_listens_where_it_says() -> None:
    text = (EXAMPLES / "docker/Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    by_name = dict(steps)
    environment = dict(pair.split("=", 1) for pair in by_name["ENV"].split())
    values = settings(environment)
    assert {str(values["port"]), str(values["metrics_port"])} == set(by_name["EXPOSE"].split())
    assert json.loads(by_name["ENTRYPOINT"]) == ["headless-bridge", "serve"]
    check = json.loads(by_name["HEALTHCHECK"].partition("CMD")[2])
    assert f"127.0.0.1:{values['metrics_port']}/readyz" in check[-1]
    compile(check[-1], "healthcheck", "exec")
    assert json.loads(by_name["CMD"])[0] == "vllm" and by_name["STOPSIGNAL"] == "SIGTERM"


def test_the_manifests_agree_with_each_other_and_with_the_flags() -> None:
    documents = {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / "kubernetes/worker.yaml").read_text())}
    service, workload = documents["Service"]["spec"], documents["StatefulSet"]["spec"]
    pod = workload["template"]["spec"]
    (container,) = pod["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    assert all(isinstance(value, str) for value in environment.values())
    values = settings(environment, *container["args"][1:])
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"grpc": values["port"], "metrics": values["metrics_port"]}
    assert {one["targetPort"]: one["port"] for one in service["ports"]} == ports
    assert service["clusterIP"] == "None" and workload["serviceName"] == documents["Service"]["metadata"]["name"]
    labels = workload["template"]["metadata"]["labels"]
    assert labels == service["selector"] == workload["selector"]["matchLabels"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in PROBES and asked["port"] == "metrics"
    pre_stop = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert values["drain_secs"] < values["stop_secs"]
    assert pre_stop + values["stop_secs"] < pod["terminationGracePeriodSeconds"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
