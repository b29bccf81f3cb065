"""The files for running servers elsewhere: sound by their schemas, and true of this server."""

import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from pagedjax import cli
from serving.app import create_app
from tests.engine.fakes import make_engine
from tests.serving.exported import exported

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "serving" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OWN_KINDS = ("deployment", "service", "disruption", "autoscaler")


def manifest(name):
    return yaml.safe_load((KUBERNETES / f"{name}.yaml").read_text())


def container():
    (found,) = manifest("deployment")["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("name", OWN_KINDS)
def test_manifests_keep_kubernetes_schemas(name):
    kubernetes_validate.validate(manifest(name), "1.30", strict=True)


def test_the_schema_checker_is_not_blind():
    wrong = manifest("deployment")
    wrong["spec"]["replikas"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.30", strict=True)


def test_kustomizations_name_files_that_are_there_and_what_they_change():
    base = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert base["resources"] == [f"{name}.yaml" for name in OWN_KINDS]
    cuda = yaml.safe_load((KUBERNETES / "cuda" / "kustomization.yaml").read_text())
    (patch,) = [yaml.safe_load((KUBERNETES / "cuda" / p["path"]).read_text()) for p in cuda["patches"]]
    assert (patch["kind"], patch["metadata"]["name"]) == ("Deployment", manifest("deployment")["metadata"]["name"])
    (patched,) = patch["spec"]["template"]["spec"]["containers"]
    assert patched["name"] == container()["name"]
    (image,) = cuda["images"]
    assert container()["image"].partition(":")[0] == image["name"]
    whole = manifest("deployment")
    whole["spec"]["template"]["spec"]["tolerations"] = patch["spec"]["template"]["spec"]["tolerations"]
    whole["spec"]["template"]["spec"]["containers"][0]["resources"] = patched["resources"]
    kubernetes_validate.validate(whole, "1.30", strict=True)


def test_everything_selects_the_same_pods_and_the_same_deployment():
    deployment = manifest("deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert manifest("service")["spec"]["selector"] == labels
    assert manifest("disruption")["spec"]["selector"]["matchLabels"] == labels
    for scaler in ("autoscaler", "keda"):
        assert manifest(scaler)["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert manifest("service")["spec"]["ports"][0]["targetPort"] in [p["name"] for p in container()["ports"]]


def test_the_server_takes_the_arguments_and_has_the_probed_routes():
    args = cli.parser().parse_args(["serve", "--host", "0.0.0.0", *container()["args"]])
    assert args.model == "smollm2-135m"
    paths = {route.path for route in create_app(make_engine()).routes}
    assert container()["livenessProbe"]["httpGet"]["path"] in paths
    for probe in ("startupProbe", "readinessProbe"):
        script = container()[probe]["exec"]["command"][-1]
        compile(script, probe, "exec")
        assert re.search(r"http://127.0.0.1:8000(/\w+)", script)[1] in paths
    assert manifest("deployment")["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"] in paths


def test_a_pod_has_longer_to_end_than_its_requests_have():
    spec = manifest("deployment")["spec"]["template"]["spec"]
    args = cli.parser().parse_args(["serve", *container()["args"]])
    asleep_s = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > asleep_s + args.drain_timeout_s


def test_scaling_and_the_dashboard_are_about_series_that_there_are():
    names = exported()
    pods = [metric["pods"]["metric"]["name"] for metric in manifest("autoscaler")["spec"]["metrics"]]
    queries = [trigger["metadata"]["query"] for trigger in manifest("keda")["spec"]["triggers"]]
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) > 15
    for text in (*pods, *queries, *expressions):
        used = re.findall(r"pagedjax_\w+", text)
        assert used and set(used) <= names.keys(), text
        for name in re.findall(r"rate\((pagedjax_\w+)", text):
            assert names[name] == ("histogram" if name.endswith("_bucket") else "counter"), text
        assert text.count("(") == text.count(")")


def test_the_dashboard_is_what_its_generator_writes():
    scope = {"__name__": "generate", "__file__": str(DEPLOY / "grafana" / "generate.py")}
    exec(compile((DEPLOY / "grafana" / "generate.py").read_text(), "generate.py", "exec"), scope)
    assert json.loads((DEPLOY / "grafana" / "dashboard.json").read_text()) == scope["dashboard"]()


def test_the_image_copies_what_is_there_and_starts_what_exists():
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    copied = [path for line in re.findall(r"^COPY (?!--)(.+)$", text, re.MULTILINE) for path in line.split()[:-1]]
    assert copied and all((ROOT / path).exists() for path in copied)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == kept
    command = json.loads(re.search(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)[1])
    arguments = json.loads(re.findall(r"^CMD (.+)$", text, re.MULTILINE)[-1])
    assert command[0] == "pagedjax" and cli.parser().parse_args([*command[1:], *arguments]).model == "smollm2-135m"
