//! Names the network namespace of a group as operators know it: by its container and its pod.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Engines show so many digits of a container's id.
const SHORT_ID: usize = 12;

/// A network namespace that is not ours, with the container and the pod that are in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// The inode of its file, which is unique while it lives.
    pub namespace: u64,
    /// The id of the server's container: hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The id of its pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Its pod's namespace and name, as `default/web-7f9c`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
}

impl Network {
    /// One that nothing else is known of.
    pub fn new(namespace: u64) -> Self {
        Self {
            namespace,
            container: None,
            pod: None,
            pod_name: None,
        }
    }

    /// The one of a process with such a `/proc/PID/cgroup`. Engines and kubelets name cgroups by ids:
    ///
    /// - `/system.slice/docker-ID.scope`, `/docker/ID`, `/machine.slice/libpod-ID.scope`;
    /// - `/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice/cri-containerd-ID.scope`, where `_` stands
    ///   for `-` in the UID; `/kubepods/burstable/podUID/ID`.
    #[must_use]
    pub fn of_cgroups(namespace: u64, cgroups: &str) -> Self {
        let mut network = Self::new(namespace);
        for name in cgroups.lines().flat_map(|line| line.rsplit('/')) {
            let name = name.split('.').next().unwrap_or(name);
            // The innermost, if containers run in a container.
            network.container = network.container.or_else(|| container(name));
            network.pod = network.pod.or_else(|| pod(name));
        }
        network
    }

    /// Notes its pod's name, by the name of the pod's folder in `/var/log/pods`: `NAMESPACE_NAME_UID`. Returns whether the folder
    /// is that of its pod.
    pub fn see_folder(&mut self, folder: &str) -> bool {
        let parts: Vec<&str> = folder.split('_').collect();
        let [namespace, name, pod] = parts[..] else {
            return false;
        };
        let is_own = self.pod.as_deref() == Some(pod);
        if is_own && [namespace, name].iter().all(|text| is_plain(text)) {
            self.pod_name = Some(format!("{namespace}/{name}"));
        }
        is_own
    }

    /// A short name, of letters and digits alone: of its container, or else of itself.
    pub fn label(&self) -> String {
        match &self.container {
            Some(id) => id.chars().take(SHORT_ID).collect(),
            None => self.namespace.to_string(),
        }
    }

    /// Whether a user means it by this text: a container's id or as much of it as engines show, a pod's id or name, or the inode
    /// of the namespace.
    pub fn is_named(&self, text: &str) -> bool {
        let of_container =
            |id: &String| text.len() >= SHORT_ID && id.starts_with(text) || id == text;
        let of_pod = |name: &String| name == text || name.rsplit('/').next() == Some(text);
        self.container.as_ref().is_some_and(of_container)
            || self.pod.as_deref() == Some(text)
            || self.pod_name.as_ref().is_some_and(of_pod)
            || self.namespace.to_string() == text
    }

    /// Whether all its texts are as [`Network::of_cgroups`] and [`Network::see_folder`] make them.
    pub fn is_sound(&self) -> bool {
        let container = self.container.as_deref();
        let pod_name = self.pod_name.as_deref();
        container.is_none_or(is_id)
            && self.pod.as_deref().is_none_or(is_pod_id)
            && pod_name.is_none_or(|name| name.split('/').all(is_plain))
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.container {
            Some(_) => write!(f, "container {}", self.label())?,
            None => write!(f, "network namespace {}", self.namespace)?,
        }
        match self.pod_name.as_ref().or(self.pod.as_ref()) {
            Some(pod) => write!(f, " of pod {pod}"),
            None => Ok(()),
        }
    }
}

/// The container's id in the name of a cgroup. `libpod-conmon-ID` is the process beside it.
fn container(name: &str) -> Option<String> {
    let (engine, id) = name.rsplit_once('-').unwrap_or(("", name));
    (is_id(id) && !engine.ends_with("conmon")).then(|| id.to_owned())
}

fn pod(name: &str) -> Option<String> {
    let (before, id) = name.rsplit_once("pod")?;
    let id = id.replace('_', "-");
    (is_pod_id(&id) && (before.is_empty() || before.ends_with('-'))).then_some(id)
}

fn is_id(text: &str) -> bool {
    (32..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A UUID, or the hash of a static pod's file.
fn is_pod_id(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-';
    (32..=36).contains(&text.len()) && text.bytes().all(fits)
}

/// Whether it can be the name of a Kubernetes object (RFC 1123).
fn is_plain(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    (1..=253).contains(&text.len()) && text.bytes().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3f2a51c09b7e4d1d8c7b6a5f4e3d2c1b0a9f8e7d6c5b4a39281706f5e4d3c2b1";
    const POD: &str = "0f5c1d2e-3a4b-4c5d-8e6f-7a8b9c0d1e2f";

    #[test]
    fn containers_and_pods_are_known_by_their_cgroups() {
        let slice = POD.replace('-', "_");
        for (cgroups, container, pod) in [
            (format!("0::/system.slice/docker-{ID}.scope\n"), true, false),
            (format!("0::/docker/{ID}\n"), true, false),
            (
                format!("12:pids:/docker/{ID}\n0::/docker/{ID}/app\n"),
                true,
                false,
            ),
            (
                format!("0::/machine.slice/libpod-{ID}.scope/container\n"),
                true,
                false,
            ),
            (
                format!(
                    "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-containerd-{ID}.scope\n"
                ),
                true,
                true,
            ),
            (
                format!("0::/kubepods/besteffort/pod{POD}/{ID}\n"),
                true,
                true,
            ),
            (format!("0::/../../pod{POD}/crio-{ID}\n"), true, true),
            (
                format!("0::/machine.slice/libpod-conmon-{ID}.scope\n"),
                false,
                false,
            ),
            (
                "0::/user.slice/user-1000.slice/session-3.scope\n".into(),
                false,
                false,
            ),
            ("0::/system.slice/podman.service\n".into(), false, false),
            (format!("0::/system.slice/notpod{POD}x\n"), false, false),
            ("0::/\n".into(), false, false),
            (String::new(), false, false),
        ] {
            let network = Network::of_cgroups(9, &cgroups);
            assert_eq!(
                network.container.as_deref(),
                container.then_some(ID),
                "{cgroups}"
            );
            assert_eq!(network.pod.as_deref(), pod.then_some(POD), "{cgroups}");
            assert!(network.is_sound());
        }
    }

    #[test]
    fn the_innermost_container_is_meant() {
        let outer = ID.replace('3', "4");
        let network = Network::of_cgroups(9, &format!("0::/docker/{outer}/docker/{ID}\n"));
        assert_eq!(network.container.as_deref(), Some(ID));
    }

    #[test]
    fn a_network_is_told_as_operators_know_it() {
        let mut network = Network::new(4_026_532_281);
        assert_eq!(network.to_string(), "network namespace 4026532281");
        assert_eq!(network.label(), "4026532281");
        assert!(network.is_named("4026532281") && !network.is_named("web"));
        network = Network::of_cgroups(9, &format!("0::/kubepods/pod{POD}/{ID}"));
        assert_eq!(network.label(), "3f2a51c09b7e");
        assert!(!network.see_folder("default_web_other") && !network.see_folder("default_web"));
        assert!(network.see_folder(&format!("a/b_web_{POD}")) && network.pod_name.is_none());
        assert!(network.see_folder(&format!("default_web-7f9c_{POD}")));
        let told = "container 3f2a51c09b7e of pod default/web-7f9c";
        assert_eq!(network.to_string(), told);
        for name in [ID, "3f2a51c09b7e", POD, "web-7f9c", "default/web-7f9c", "9"] {
            assert!(network.is_named(name), "{name}");
        }
        for other in ["3f2a51c09b7", "web", "default", "", "3f2a51c09b7f"] {
            assert!(!network.is_named(other), "{other}");
        }
    }

    #[test]
    fn what_is_read_back_may_be_hostile() {
        let mut network = Network::of_cgroups(9, &format!("0::/kubepods/pod{POD}/{ID}"));
        let json = serde_json::to_string(&network).expect("JSON");
        assert_eq!(
            serde_json::from_str::<Network>(&json).expect("read"),
            network
        );
        network.container = Some("../../etc".into());
        assert!(!network.is_sound());
        network.container = None;
        network.pod_name = Some("a/b\n".into());
        assert!(!network.is_sound());
    }
}
