"""Prints the options and the command with which podman runs what a DaemonSet would run on a node, one word a line.

    pod.py MANIFEST FOLDER PLACE=OTHER…

The configuration of its ConfigMaps is written into FOLDER. A PLACE of the node that the manifest mounts may be another one here.
"""

import sys
from pathlib import Path

import yaml


def documents(path, kind):
    with open(path) as file:
        return [one for one in yaml.safe_load_all(file) if one and one["kind"] == kind]


def mounted(volume, configs, folder, places):
    """The folder of this machine that is mounted for a volume."""
    if "configMap" not in volume:
        return places.get(volume["hostPath"]["path"], volume["hostPath"]["path"])
    name = volume["configMap"]["name"]
    at = folder / name
    at.mkdir(exist_ok=True)
    for file, text in configs[name].items():
        if not (at / file).exists():
            (at / file).write_text(text)
    return str(at)


def options(pod, container, folders):
    # As the kubelet and the engine below it do: no network but the pod's own, no list of system calls but the engine's.
    yield from ["--network=none", "--no-hosts"]
    assert not pod["hostNetwork"] and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    if pod.get("hostPID"):
        yield "--pid=host"
    rights = container["securityContext"]
    assert not rights["privileged"] and rights["capabilities"]["drop"] == ["ALL"]
    yield "--cap-drop=all"
    yield from (f"--cap-add={name}" for name in rights["capabilities"]["add"])
    yield f"--user={rights['runAsUser']}:{rights['runAsGroup']}"
    if rights["appArmorProfile"]["type"] == "Unconfined":
        yield "--security-opt=apparmor=unconfined"
    if rights["readOnlyRootFilesystem"]:
        yield from ["--read-only", "--read-only-tmpfs=false"]
    for mount in container["volumeMounts"]:
        end = ":ro" if mount.get("readOnly") else ""
        yield f"--volume={folders[mount['name']]}:{mount['mountPath']}{end}"


def main():
    manifest, folder, *others = sys.argv[1:]
    places = dict(other.split("=", 1) for other in others)
    [daemons] = documents(manifest, "DaemonSet")
    configs = {one["metadata"]["name"]: one["data"] for one in documents(manifest, "ConfigMap")}
    pod = daemons["spec"]["template"]["spec"]
    [container] = pod["containers"]
    volumes = {one["name"]: mounted(one, configs, Path(folder), places) for one in pod["volumes"]}
    print(*options(pod, container, volumes), "--", *container["args"], sep="\n")


main()
