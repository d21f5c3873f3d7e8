"""Kubernetes: a Deployment, a Service, a claim for the models, and a budget that keeps a server through maintenance."""

from typing import Any

from quire.entrypoints.deploy.plan import CACHE, KEY_FILE, LEAVE_S, Plan, check_words, container_words
from quire.errors import ConfigError

_KEYS = "/run/secrets/quire"
_START_S = 3600
"""Seconds that a model may take to download and load."""


def manifests(plan: Plan) -> list[dict[str, Any]]:
    """The objects, in the order in which they are made.
    Raises ConfigError: a word names a file of this machine, which the cluster does not have."""
    check_words(plan)
    if plan.paths:
        why = f"{plan.paths[0]!r} is on this machine, and not in the cluster; give a hub id, or a path below {CACHE}"
        raise ConfigError.of("model", f"{why}, which is the claim {plan.name}-cache")
    budget = {"minAvailable": 1, "selector": {"matchLabels": _labels(plan)}}
    return [
        _object("v1", "PersistentVolumeClaim", f"{plan.name}-cache", plan, _claim(plan)),
        _object("apps/v1", "Deployment", plan.name, plan, _deployment(plan)),
        _object("v1", "Service", plan.name, plan, _service(plan)),
        *([_object("policy/v1", "PodDisruptionBudget", plan.name, plan, budget)] if plan.replicas > 1 else []),
    ]


def _labels(plan: Plan) -> dict[str, str]:
    return {"app.kubernetes.io/name": "quire", "app.kubernetes.io/instance": plan.name}


def _object(version: str, kind: str, name: str, plan: Plan, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(plan)}, "spec": spec}


def _claim(plan: Plan) -> dict[str, Any]:
    access = "ReadWriteOnce" if plan.replicas == 1 else "ReadWriteMany"
    return {"accessModes": [access], "resources": {"requests": {"storage": plan.storage}}}


def _service(plan: Plan) -> dict[str, Any]:
    return {"selector": _labels(plan), "ports": [{"name": "http", "port": plan.port, "targetPort": "http"}]}


def _deployment(plan: Plan) -> dict[str, Any]:
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/path": "/metrics",
        "prometheus.io/port": str(plan.port),
    }
    return {
        "replicas": plan.replicas,
        "selector": {"matchLabels": _labels(plan)},
        # A new server takes the place of an old one: a surge would need devices that nobody else may use.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": {
            "metadata": {"labels": _labels(plan), "annotations": annotations},
            "spec": {
                # A service called quire would become variables QUIRE_PORT … in every container.
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": plan.stop_s + LEAVE_S,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 1000,
                    "fsGroup": 1000,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [_container(plan)],
                "volumes": _volumes(plan),
            },
        },
    }


def _container(plan: Plan) -> dict[str, Any]:
    mounts = [
        {"name": "cache", "mountPath": CACHE},
        {"name": "keys", "mountPath": _KEYS, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    container: dict[str, Any] = {
        "name": "quire",
        "image": plan.image,
        # `$(NAME)` in an argument would be replaced; two dollars are one.
        "args": [word.replace("$", "$$") for word in container_words(plan, f"{_KEYS}/{KEY_FILE}")],
        "env": [
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": f"{plan.name}-hub", "key": "token", "optional": True}},
            }
        ],
        "ports": [{"name": "http", "containerPort": plan.port}],
        "startupProbe": _probe(plan.ready_path, every_s=5, failures=_START_S // 5),
        "readinessProbe": _probe(plan.ready_path, every_s=5, failures=1),
        "livenessProbe": _probe("/live", every_s=10, failures=3),
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVE_S}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if plan.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": plan.gpus}}
    if plan.shared_memory:
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    return container


def _probe(path: str, every_s: int, failures: int) -> dict[str, Any]:
    request = {"path": path, "port": "http"}
    return {"httpGet": request, "periodSeconds": every_s, "timeoutSeconds": 5, "failureThreshold": failures}


def _volumes(plan: Plan) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "cache", "persistentVolumeClaim": {"claimName": f"{plan.name}-cache"}},
        {"name": "keys", "secret": {"secretName": f"{plan.name}-api-keys", "defaultMode": 0o440}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if plan.shared_memory:
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}})
    return volumes
