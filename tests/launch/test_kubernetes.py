"""launch=k8s: names, manifests against the published schemas, faults, and what kubectl is asked.

No test has a cluster. The types of Kubernetes and of JobSet are those that kubeflow-trainer-api has
generated from their OpenAPI schemas: a field that a schema does not have is lost in them, and a
value of another type is refused. kubectl is a stand-in, see `fake_kubectl.py`.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_runner import CommandResult, run_here
from fake_kubectl import FakeCluster
from hypothesis import given
from hypothesis import strategies as st
from run_folders import make_run

from echelon.config.validate import NAME_CHARACTERS
from echelon.errors import ExitCode
from echelon.launch.k8s.names import MAX_NAME_LENGTH, make_resource_name

TYPES = {
    "Secret": "IoK8sApiCoreV1Secret",
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
    "Service": "IoK8sApiCoreV1Service",
    "Job": "IoK8sApiBatchV1Job",
    "JobSet": "JobsetV1alpha2JobSet",
}
K8S = (
    *("train", "launch=k8s", "launch.container=ghcr.io/lab/train:1", "run.name=a"),
    *("launch.k8s.volumes=[team:/mnt/team]", "run.dir=/mnt/team/runs"),
)
EVERYTHING = (
    *("launch.gpus_per_node=4", "launch.cpus_per_node=16", "launch.k8s.memory=64Gi"),
    *("launch.k8s.volumes=[team:/mnt/team,data:/mnt/data:ro]", "launch.k8s.shared_memory=8Gi"),
    *("launch.k8s.namespace=ml", "launch.k8s.context=prod", "launch.k8s.workdir=/workspace"),
    *("launch.k8s.node_selector=['gpu=a100']", "launch.k8s.priority_class=high"),
    "launch.k8s.tolerations=['nvidia.com/gpu','team=ml:NoSchedule']",
    *("launch.k8s.service_account=trainer", "launch.k8s.pull_secrets=[registry]"),
)


@pytest.fixture
def cluster(tmp_path: Path) -> FakeCluster:
    folder = tmp_path / "cluster"
    folder.mkdir()
    return FakeCluster(folder)


def _plan(folder: Path, *words: str) -> dict[str, dict[str, Any]]:
    """The objects of a dry run by their kinds."""
    done = run_here([*K8S, *words, "--dry-run", "--json"], folder)
    assert done.code == ExitCode.OK, done.err
    return {each["kind"]: each for each in yaml.safe_load_all(json.loads(done.out)["manifest"])}


def _pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = objects["Job"]["spec"]["template"]["spec"]
    return pod


# --- names ---


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("night-3", "night-3"),
        ("a" * 40, "a" * 40),
        ("My_run", "my-run-45e51da"),
        ("2026", "run-2026-1a0ef54"),
        ("a." + "b" * 90, "a-" + "b" * 30 + "-f93ee38"),
    ],
)
def test_a_name_stays_or_gets_a_digest(run: str, name: str) -> None:
    made = make_resource_name(run)
    assert re.sub(r"[0-9a-f]{7}$", "", made) == re.sub(r"[0-9a-f]{7}$", "", name)
    assert len(made) == len(name)


@pytest.mark.slow
@given(st.text(alphabet=sorted(NAME_CHARACTERS), min_size=1, max_size=100))
def test_every_run_has_a_name_in_kubernetes(run: str) -> None:
    name = make_resource_name(run)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
    assert len(name) <= MAX_NAME_LENGTH
    assert name == run or re.search(r"-[0-9a-f]{7}$", name)  # so that no two runs share one


# --- manifests ---


@pytest.mark.parametrize("words", [(), EVERYTHING], ids=["least", "everything"])
@pytest.mark.parametrize("resource", ["job", "jobset"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_manifests_are_what_the_schemas_allow(
    words: tuple[str, ...], resource: str, nodes: int, tmp_path: Path
) -> None:
    from kubeflow_trainer_api import models  # slow to import

    shape = (f"launch.k8s.resource={resource}", f"launch.nodes={nodes}")
    objects = _plan(tmp_path, *shape, *words)
    service = ["Service"] if nodes > 1 and resource == "job" else []
    kind = {"job": "Job", "jobset": "JobSet"}[resource]
    assert list(objects) == ["Secret", "ConfigMap", *service, kind]
    for name, each in objects.items():
        assert getattr(models, TYPES[name]).from_dict(each).to_dict() == each
    assert list(tmp_path.iterdir()) == []  # a dry run writes nothing


def test_a_pod_has_what_was_asked_for(tmp_path: Path) -> None:
    pod = _pod(_plan(tmp_path, *EVERYTHING))
    [container] = pod["containers"]
    more = {"memory": "64Gi", "nvidia.com/gpu": "4"}
    assert container["resources"] == {"requests": {"cpu": "16"} | more, "limits": more}
    assert container["workingDir"] == "/workspace"
    mounts = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
    paths = {"/etc/echelon": True, "/dev/shm": False, "/mnt/team": False, "/mnt/data": True}
    assert mounts == paths
    assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"},
    ]
    assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"gpu": "a100"}, "high")
    assert pod["serviceAccountName"] == "trainer"
    assert _pod(_plan(tmp_path))["automountServiceAccountToken"] is False


def test_exit_codes_of_echelon_decide_what_follows(tmp_path: Path) -> None:
    job = _plan(tmp_path, "launch.nodes=2")["Job"]["spec"]
    saved, evicted, ended = job["podFailurePolicy"]["rules"]
    assert (saved["action"], saved["onExitCodes"]["values"]) == ("Ignore", [5, 11, 75])
    assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == (
        "Ignore",
        "DisruptionTarget",
    )
    assert (ended["action"], ended["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    assert ended["onExitCodes"]["values"] == [4, 137, 143]
    pod = job["template"]["spec"]
    assert (job["backoffLimit"], pod["restartPolicy"]) == (6, "Never")
    assert pod["terminationGracePeriodSeconds"] == 120
    # By the documentation of JobSet: these reasons and actions, and host names of its pods.
    words = ("launch.nodes=2", "launch.k8s.resource=jobset", "launch.max_restarts=2")
    job_set = _plan(tmp_path, *words)["JobSet"]["spec"]
    assert job_set["failurePolicy"]["maxRestarts"] == 2
    [rule] = job_set["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    [replicated] = job_set["replicatedJobs"]
    inner = replicated["template"]["spec"]
    assert [r["action"] for r in inner["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
    assert inner["backoffLimit"] == 0
    env = {e["name"]: e["value"] for e in inner["template"]["spec"]["containers"][0]["env"]}
    assert env["MASTER_ADDR"] == "a-node-0-0.a"


def test_the_pods_find_node_0_by_the_service(tmp_path: Path) -> None:
    objects = _plan(tmp_path, "launch.nodes=2")
    service, pod = objects["Service"]["spec"], _pod(objects)
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    labels = objects["Job"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    env = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert env == {"MASTER_ADDR": "a-0.a", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    assert pod["subdomain"] == objects["Service"]["metadata"]["name"]


def test_code_of_this_folder_is_at_its_place_in_the_image(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "mine.py").write_text("def experiment(cfg): ...\n")
    words = ("experiment=src/mine.py:experiment", "launch.k8s.workdir=/workspace")
    start = json.loads(_plan(tmp_path, *words)["ConfigMap"]["data"]["run.json"])
    assert start["config"]["experiment"]["entry"] == "/workspace/src/mine.py:experiment"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = (f"experiment={tmp_path}/src/mine.py:experiment", words[1])
    done = run_here([*K8S, *words, "--dry-run"], elsewhere)
    assert done.code == ExitCode.USAGE
    assert "which is not in this folder" in done.err


def test_the_plan_says_that_it_is_untried_and_shows_no_secret(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("WANDB_API_KEY=not-told\n")
    secrets.chmod(0o600)
    done = run_here([*K8S, f"launch.secrets={secrets}", "--dry-run"], tmp_path)
    steps = done.out.partition("\n\n")[2].partition("\n\nmanifest:")[0].splitlines()
    assert "has never run on a cluster" in steps[-1]
    assert "not-told" not in done.out
    assert "ECHELON_KEY: '?'" in done.out


# --- faults ---


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    words = [
        *("train", "launch=k8s", "launch.k8s.memory=64GB", "launch.k8s.volumes=[team,a:/etc/../x]"),
        *("launch.k8s.node_selector=[gpu]", "launch.k8s.tolerations=['gpu:Never']"),
        *("launch.k8s.namespace=My_team", "launch.k8s.resource=pod", "launch.spares=1"),
        *("launch.min_nodes=1", "launch.preflight=true", "launch.k8s.workdir=code"),
        *("launch.k8s.grace_s=0", "launch.k8s.gpu_resource=gpu"),
    ]
    done = run_here([*words, "--dry-run"], tmp_path)
    assert done.code == ExitCode.USAGE
    for what in (
        "without an image",
        "launch.k8s.memory=64GB is not a quantity",
        "launch.k8s.volumes: 'team'",
        "launch.k8s.volumes: 'a:/etc/../x'",
        "launch.k8s.node_selector: 'gpu'",
        "launch.k8s.tolerations: 'gpu:Never'",
        "launch.k8s.namespace: 'My_team'",
        "launch.k8s.resource=pod: there is no such choice",
        "launch.spares=1, but with launch=k8s",
        "launch.min_nodes=1, but with launch=k8s",
        "launch.preflight=true, but launch=k8s",
        "launch.k8s.workdir=code",
        "launch.k8s.grace_s=0 is below 1",
        "launch.k8s.gpu_resource='gpu'",
    ):
        assert done.err.count(what) == 1, what


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["run.dir=runs"], "run.dir=runs is in none of the volumes"),
        (["run.dir=/mnt/teams/runs"], "is in none of the volumes"),
        (["launch.k8s.volumes=[team:/mnt/team:ro]"], "in a volume that is only read"),
        (["launch.k8s.volumes=[a:/mnt/team,b:/mnt/team/]"], "has /mnt/team more than once"),
        (["launch.k8s.volumes=[a:/dev/shm,b:/mnt/team]"], "/dev/shm is used by the pods already"),
        (["launch.container=image.sif"], "is not an image that a node of Kubernetes can pull"),
        (["launch.sbatch=['--mem=1G']"], "add launch=slurm, or leave launch.sbatch out"),
        (["launch=local"], "add launch=k8s, or leave launch.k8s.volumes out"),
    ],
)
def test_a_fault_has_a_remedy(words: list[str], what: str, tmp_path: Path) -> None:
    done = run_here([*K8S, *words, "--dry-run"], tmp_path)
    assert done.code == ExitCode.USAGE
    assert what in done.err


def test_settings_of_a_file_are_for_the_launchers_that_read_them(tmp_path: Path) -> None:
    (tmp_path / "echelon.yaml").write_text(
        "launch:\n  gpus_per_node: 2\n  partition: long\n  k8s:\n    namespace: ml\n"
    )
    assert _plan(tmp_path)["Job"]["metadata"]["namespace"] == "ml"
    assert run_here(["train", "launch=local", "--dry-run"], tmp_path).code == ExitCode.OK


# --- kubectl ---


def _type(cluster: FakeCluster, folder: Path, *words: str) -> CommandResult:
    return run_here(list(words), folder, PATH=cluster.path)


def test_without_kubectl_there_is_a_sentence(tmp_path: Path) -> None:
    done = run_here(K8S, tmp_path, PATH="/nowhere")
    assert done.code == ExitCode.USAGE
    assert "there is no kubectl on this machine's PATH" in done.err
    assert "--dry-run prints the manifest anywhere" in done.err


@pytest.mark.slow
def test_a_run_is_submitted_once(cluster: FakeCluster, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("WANDB_API_KEY=not-told\n")
    secrets.chmod(0o600)
    words = (*K8S, *EVERYTHING, "launch.nodes=2", f"launch.secrets={secrets}")
    done = _type(cluster, tmp_path, *words)
    assert done.code == ExitCode.OK, done.err
    assert "kubectl --context=prod --namespace=ml logs -f" in done.out
    assert "not-told" not in done.output + "".join(cluster.calls)
    kinds = [call.split()[2] for call in cluster.calls]
    assert kinds == ["get", "create", "create", "replace"]
    assert "--dry-run=server" in cluster.calls[1]
    [job] = cluster.read("Job")
    for kind in ("Secret", "ConfigMap", "Service"):  # deleted with the Job, also by its ttl
        [each] = cluster.read(kind)
        [owner] = each["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Job", job["metadata"]["uid"])
    [secret] = cluster.read("Secret")
    assert secret["stringData"]["WANDB_API_KEY"] == "not-told"
    assert len(secret["stringData"]["ECHELON_KEY"]) == 64

    again = _type(cluster, tmp_path, *words)
    assert again.code == ExitCode.USAGE
    assert "run a is queued or running already, as job a" in again.err

    cluster.finish("Job", "Failed", "Pod failed with exit code 1")
    resumed = _type(cluster, tmp_path, *words)
    assert resumed.code == ExitCode.OK, resumed.err
    [new] = cluster.read("Secret")
    assert new["stringData"]["ECHELON_KEY"] != secret["stringData"]["ECHELON_KEY"]


def test_what_the_api_server_refuses_leaves_nothing(cluster: FakeCluster, tmp_path: Path) -> None:
    words = 'jobs.batch "a" is forbidden: exceeded quota: gpus'
    cluster.refuse("Job", f"Error from server (Forbidden): {words}")
    done = _type(cluster, tmp_path, *K8S)
    assert done.code == ExitCode.USAGE
    assert words in done.err
    assert list(cluster.objects.iterdir()) == []


def test_waiting_gives_the_end_of_the_job(cluster: FakeCluster, tmp_path: Path) -> None:
    from echelon.config.compose import compose
    from echelon.launch.k8s.launcher import _wait_until_over

    assert _type(cluster, tmp_path, *K8S).code == ExitCode.OK
    config = compose(K8S[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", cluster.path)
        cluster.finish("Job", "Failed", "Pod a-0 failed with exit code 1")
        assert _wait_until_over(config, "a") == ExitCode.FAILED
        cluster.finish("Job", "Complete")
        assert _wait_until_over(config, "a") == ExitCode.OK


def test_several_runs_are_queued_and_not_waited_for(cluster: FakeCluster, tmp_path: Path) -> None:
    words = (*K8S, "-m", "lr=0.1,0.2")
    waited = _type(cluster, tmp_path, *words, "--wait")
    assert "--wait cannot follow several runs of launch=k8s" in waited.err
    assert _type(cluster, tmp_path, *words).code == ExitCode.OK
    assert [each["metadata"]["name"] for each in cluster.read("Job")] == ["a-0", "a-1"]


def test_cancel_deletes_the_objects_after_a_mark(cluster: FakeCluster, tmp_path: Path) -> None:
    assert _type(cluster, tmp_path, *K8S).code == ExitCode.OK
    process = {"host": "a-0", "pid": 1, "born": "1@boot"}
    status = {"state": "running", "launcher": "k8s", "process": process, "step": 5}
    run = make_run(tmp_path / "runs", "a", status=status)
    now = _type(cluster, tmp_path, "cancel", "a", "--now")
    assert "always asked to end first" in now.err
    planned = _type(cluster, tmp_path, "cancel", "a", "--dry-run")
    assert "its pods would be asked to save and end, and deleted" in planned.out
    assert cluster.read("Job") != []
    done = _type(cluster, tmp_path, "cancel", "a")
    assert done.code == ExitCode.OK, done.err
    assert run.cancel_file.exists()
    assert list(cluster.objects.iterdir()) == []
    without = run_here(["cancel", "a"], tmp_path, PATH="/nowhere")
    assert "there is no kubectl on this machine's PATH" in without.err


def test_a_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.yml").write_text(
        "method: grid\nmetric: {name: eval_loss, goal: minimize}\nparameters:\n"
        "  lr: {values: [0.1, 0.2]}\n"
    )
    words = [word for word in K8S[1:] if not word.startswith("run.")]
    done = run_here(["sweep", "sweep.yml", "--dir", "/mnt/team/runs", *words], tmp_path)
    assert done.code == ExitCode.USAGE
    assert "launch=k8s queues a run and ends" in done.err


def test_this_machine_is_in_no_manifest(tmp_path: Path) -> None:
    assert socket.gethostname() not in json.dumps(_plan(tmp_path))
