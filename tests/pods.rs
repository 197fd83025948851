//! The agent as contrib/kubernetes runs it: in a container with the capabilities, mounts and namespaces of the manifest, beside
//! servers in containers of their own that all listen on one port.

#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use nix::sys::utsname::uname;
use serde_json::Value;
use wakeone_kernel::capability::{self, Capability};
use wakeone_kernel::netns;

use support::real::installed;
use support::steered::isolated;
use support::{Ground, WAKEONE, slowly, slowness};

const MANIFEST: &str = "kubernetes/agent.yaml";
/// The option of podman that gives a container a capability.
const ADDED: &str = "--cap-add=";
/// Connections that a client keeps open.
const KEPT: usize = 64;

fn contrib(name: &str) -> String {
    format!("{}/../../contrib/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn support(name: &str) -> String {
    format!("{}/../../tests/support/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_plain_manifest_is_what_the_chart_renders() {
    if !installed("helm") {
        return eprintln!("skipped: helm is not installed");
    }
    let script = format!("{}/../../scripts/kubernetes", env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(script)
        .arg("--print")
        .output()
        .expect("script");
    assert!(output.status.success(), "{output:?}");
    let plain = std::fs::read_to_string(contrib(MANIFEST)).expect("manifest");
    let rendered = String::from_utf8(output.stdout).expect("text");
    assert_eq!(rendered, plain, "scripts/kubernetes writes it anew");
}

#[test]
fn kubernetes_takes_the_manifests() {
    if !installed("kubernetes-validate") {
        return eprintln!("skipped: kubernetes-validate is not installed");
    }
    for manifest in [MANIFEST, "kubernetes/load-job.yaml"] {
        let mut validate = Command::new("kubernetes-validate");
        validate
            .args(["--strict", "-k", "1.34"])
            .arg(contrib(manifest));
        let output = validate.output().expect("kubernetes-validate");
        assert!(output.status.success(), "{output:?}");
    }
}

/// The server of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    NginxReuseport,
    Nginx,
    Gunicorn,
    Uvicorn,
    Unbound,
}

const KINDS: [Kind; 5] = [
    Kind::NginxReuseport,
    Kind::Nginx,
    Kind::Gunicorn,
    Kind::Uvicorn,
    Kind::Unbound,
];

impl Kind {
    /// How a client asks it.
    fn asked(self) -> &'static str {
        match self {
            Self::Unbound => "dns",
            _ => "http",
        }
    }

    /// The shell's command, in a container whose /tmp is its own. `folder` has the configurations.
    fn command(self, folder: &Path) -> String {
        let file = |name: &str| folder.join(name).display().to_string();
        let app = support("../servers");
        match self {
            Self::NginxReuseport => format!("exec nginx -c {}", file("nginx-reuseport.conf")),
            Self::Nginx => format!("exec nginx -c {}", file("nginx.conf")),
            Self::Gunicorn => format!(
                "exec gunicorn --workers 2 --worker-class gthread --threads 100 --keep-alive 600 --worker-tmp-dir /tmp --chdir {app} --bind 0.0.0.0:8080 app:wsgi"
            ),
            // A worker that starts takes longer in an emulated machine than the five seconds after which uvicorn ends it.
            Self::Uvicorn => format!(
                "exec uvicorn --workers 2 --timeout-worker-healthcheck 300 --timeout-keep-alive 600 --log-level warning --app-dir {app} --host 0.0.0.0 --port 8080 app:asgi"
            ),
            Self::Unbound => format!("exec unbound -c {}", file("unbound.conf")),
        }
    }
}

fn nginx(reuseport: &str) -> String {
    let folders = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let folders: Vec<String> = folders
        .iter()
        .map(|name| format!("{name}_temp_path /tmp/{name};"))
        .collect();
    format!(
        "daemon off; user nobody nogroup; worker_processes 2; pid /tmp/nginx.pid; error_log stderr;\n\
         events {{ worker_connections 512; }}\n\
         http {{ access_log off; {} keepalive_timeout 600; keepalive_requests 100000;\n\
         server {{ listen 8080 {reuseport}; location / {{ return 200 'ok'; }} }} }}\n",
        folders.join(" ")
    )
}

const UNBOUND: &str = "server:\n interface: 0.0.0.0\n port: 8080\n do-ip6: no\n num-threads: 2\n so-reuseport: yes\n \
    do-daemonize: no\n username: \"\"\n chroot: \"\"\n directory: /tmp\n pidfile: \"\"\n use-syslog: no\n \
    incoming-num-tcp: 500\n tcp-idle-timeout: 600000\n module-config: iterator\n access-control: 0.0.0.0/0 allow\n \
    local-zone: test. static\n local-data: \"a.test. A 192.0.2.1\"\nremote-control:\n control-enable: no\n";

/// A node, and what runs on it.
struct Node {
    ground: Ground,
    /// The files of the containers: those of this machine.
    root: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

/// An agent steers servers in all containers of the machine, those of other tests, too.
static ALONE: Mutex<()> = Mutex::new(());

impl Node {
    /// `None`, with a message, where no containers can be made.
    fn new() -> Option<Self> {
        let ground = isolated()?;
        for program in ["podman", "crun", "unbound", "nginx", "gunicorn", "uvicorn"] {
            if !installed(program) {
                eprintln!("skipped: {program} is not installed");
                return None;
            }
        }
        let node = Self {
            root: ground.path().join("root"),
            ground,
            _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner),
        };
        for folder in ["root", "changes", "bpf", "conf", "pods", "node"] {
            std::fs::create_dir(node.at(folder)).expect("folder");
        }
        if let Err(why) = node.mount() {
            eprintln!("skipped: containers cannot be made here: {why}");
            return None;
        }
        for (name, text) in [
            ("nginx-reuseport.conf", nginx("reuseport")),
            ("nginx.conf", nginx("")),
            ("unbound.conf", UNBOUND.to_owned()),
        ] {
            std::fs::write(node.at("conf").join(name), text).expect("write");
        }
        Some(node)
    }

    /// Mounts what containers need, in a namespace of this thread: whatever happens, it ends with the test. The error names what this
    /// machine cannot mount.
    fn mount(&self) -> Result<(), String> {
        unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace");
        let mount = |words: &[&str], at: &Path| {
            let output = Command::new("mount").args(words).arg(at).output();
            let output = output.expect("mount");
            let said = String::from_utf8_lossy(&output.stderr);
            match output.status.success() {
                true => Ok(()),
                false => Err(format!("{}: {}", words.join(" "), said.trim())),
            }
        };
        mount(&["--make-rprivate"], Path::new("/"))?;
        // crun gives no container a cgroup of its own beside version 1.
        let cgroups = Path::new("/sys/fs/cgroup");
        if !cgroups.join("cgroup.procs").exists() {
            mount(&["-t", "cgroup2", "cgroup2"], cgroups)?;
        }
        // Containers have this machine's files, and crun makes folders among them.
        let changes = self.at("changes");
        mount(&["-t", "tmpfs", "changes"], &changes)?;
        let (upper, work) = (changes.join("upper"), changes.join("work"));
        for folder in [&upper, &work] {
            std::fs::create_dir(folder).expect("folder");
        }
        let (upper, work) = (upper.display(), work.display());
        let layers = format!("lowerdir=/,upperdir={upper},workdir={work}");
        mount(&["-t", "overlay", "-o", &layers, "root"], &self.root)?;
        // The machine may have no bpffs, or one with pins of others, and in its /run are others' files.
        mount(&["-t", "tmpfs", "run"], &self.root.join("run"))?;
        mount(&["-t", "bpf", "bpf"], &self.at("bpf"))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.ground.path().join(name)
    }

    fn podman(&self, words: &[&str]) -> Command {
        let mut command = Command::new("podman");
        command.args(["--cgroup-manager", "cgroupfs", "--storage-driver", "vfs"]);
        let runtime = match is_ours("SYS_RESOURCE") {
            true => "crun".to_owned(),
            false => support("oci_runtime.py"),
        };
        command.args(["--runtime", &runtime, "--events-backend", "none"]);
        for (option, folder) in [
            ("--root", "store"),
            ("--runroot", "state"),
            ("--tmpdir", "tmp"),
        ] {
            command.arg(option).arg(self.at(folder));
        }
        command.args(words);
        command
    }

    /// Runs podman, and returns what it prints.
    fn done(&self, words: &[&str]) -> String {
        let output = self.podman(words).output().expect("podman");
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Starts a container.
    fn start<'a>(&self, name: &'a str, options: &[&str], command: &[&str]) -> Container<'_, 'a> {
        let named = format!("--name={name}");
        let mut words = vec![
            "run",
            "--detach",
            &named,
            "--pids-limit=-1",
            // This machine may not allow more.
            "--ulimit=nofile=4096:4096",
            "--ulimit=nproc=4096:4096",
            "--cgroupns=private",
        ];
        words.extend(options);
        words.extend(["--rootfs", self.root.to_str().expect("text")]);
        words.extend(command);
        self.done(&words);
        println!("{name} is started");
        let told = self.done(&["inspect", "--format", "{{.State.Pid}} {{.Id}}", name]);
        let (pid, id) = told.split_once(' ').expect("two words");
        let pid = pid.parse().expect("a number");
        Container {
            node: self,
            name,
            pid,
            network: netns::of(pid).expect("its network"),
            id: id.to_owned(),
        }
    }

    /// Starts a server in a pod of its own.
    fn pod<'a>(&self, name: &'a str, kind: Kind) -> Pod<'_, 'a> {
        let conf = self.at("conf").display().to_string();
        let command = kind.command(&self.at("conf"));
        let path = format!("--env=PATH={}", std::env::var("PATH").expect("PATH"));
        let checkout = std::fs::canonicalize(support("../..")).expect("a folder");
        let checkout = checkout.display();
        let options = [
            "--network=none",
            "--read-only",
            "--tmpfs=/tmp:mode=1777,notmpcopyup",
            "--env=WAKEONE=yes",
            "--env=WAKEONE_SLOT=0",
            &path,
            &format!("--volume={conf}:{conf}:ro"),
            // The checkout may be below /tmp.
            &format!("--volume={checkout}:{checkout}:ro"),
        ];
        let container = self.start(name, &options, &["sh", "-c", &command]);
        Pod { container, kind }
    }

    /// Writes what the agent is to steer. nginx writes its title over its environment, so it cannot ask by that.
    fn configure(&self) {
        let folder = self.at("conf/wakeone-agent");
        std::fs::create_dir_all(&folder).expect("folder");
        let target = "[[target]]\nowners = ['*']\nrescue = true\n";
        let config =
            format!("networks = 'all'\n{target}opt_in = true\n{target}process = 'nginx'\n");
        std::fs::write(folder.join("agent.toml"), config).expect("write");
    }

    /// The options of podman and the arguments of the agent that the manifest stands for.
    fn manifest(&self) -> (Vec<String>, Vec<String>) {
        let place = |of: &str, folder: &str| format!("{of}={}", self.at(folder).display());
        let output = Command::new("python3")
            .args([
                support("pod.py"),
                contrib(MANIFEST),
                self.at("conf").display().to_string(),
            ])
            .args([
                place("/run/wakeone", "node"),
                place("/var/log/pods", "pods"),
                place("/sys/fs/bpf", "bpf"),
            ])
            .output()
            .expect("python3");
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).expect("text");
        let (options, arguments) = text.split_once("\n--\n").expect("options and arguments");
        let lines = |text: &str| text.lines().map(str::to_owned).collect();
        (lines(options), lines(arguments))
    }

    /// Starts an agent as the manifest has it, by this build of the command, without this capability.
    fn agent<'a>(&self, name: &'a str, build: &str, without: Option<&str>) -> Agent<'_, 'a> {
        self.configure();
        let (options, arguments) = self.manifest();
        let is_kept = |option: &&str| match option.strip_prefix(ADDED) {
            None => true,
            Some(name) => without != Some(name) && is_ours(name),
        };
        let options: Vec<&str> = options.iter().map(String::as_str).filter(is_kept).collect();
        let words = arguments.iter().map(String::as_str);
        let words: Vec<&str> = std::iter::once(build).chain(words).collect();
        let container = self.start(name, &options, &words);
        Agent { container }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self
            .podman(&["rm", "--all", "--force", "--time=0"])
            .output();
        for at in [self.root.clone(), self.at("changes"), self.at("bpf")] {
            let _ = Command::new("umount").arg("--recursive").arg(at).status();
        }
    }
}

/// Whether this machine's root has a capability. One that it has not no container gets.
fn is_ours(name: &str) -> bool {
    let capability: Capability = format!("CAP_{name}").parse().expect("a capability");
    capability::has(capability)
}

/// A running container.
struct Container<'a, 'b> {
    node: &'a Node,
    name: &'b str,
    pid: u32,
    /// The inode of its network namespace.
    network: u64,
    id: String,
}

impl Container<'_, '_> {
    fn log(&self) -> String {
        let output = self
            .node
            .podman(&["logs", self.name])
            .output()
            .expect("podman");
        let said = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&said).into_owned()
    }

    /// Ends it by SIGTERM, and removes it.
    fn end(self) {
        self.node.done(&["stop", "--time=60", self.name]);
        self.node.done(&["rm", self.name]);
    }

    fn kill(self) {
        self.node.done(&["rm", "--force", "--time=0", self.name]);
    }
}

/// A server in a container.
struct Pod<'a, 'b> {
    container: Container<'a, 'b>,
    kind: Kind,
}

impl Pod<'_, '_> {
    fn client(&self, way: &str, numbers: &[usize]) -> Client {
        let pid = self.container.pid.to_string();
        let mut client = Command::new("nsenter");
        client.args([
            "--target",
            &pid,
            "--net",
            "python3",
            &support("pod_client.py"),
        ]);
        client.args([way, self.kind.asked()]);
        client.args(numbers.iter().map(ToString::to_string));
        Client::start(&mut client)
    }
}

/// Opens connections to each of these and keeps them open.
fn keep(pods: &[Pod<'_, '_>]) -> Vec<Client> {
    // With all at once, the CPUs would be the machine's limit, and whoever runs would take the next one.
    let gap_ms = (4 * slowness() as usize).max(16);
    let opens = |pod: &Pod<'_, '_>| pod.client("kept", &[KEPT, gap_ms]);
    let mut clients: Vec<Client> = pods.iter().map(opens).collect();
    for client in &mut clients {
        assert_eq!(client.line(), "open");
    }
    clients
}

struct Client {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Client {
    fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("client");
        let (input, output) = (process.stdin.take(), process.stdout.take());
        Self {
            process,
            input,
            output: BufReader::new(output.expect("stdout")),
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }

    /// Asks by each connection. Returns how many gave no answer.
    fn ask(&mut self) -> u64 {
        let input = self.input.as_mut().expect("stdin");
        input.write_all(b"ask\n").expect("write");
        self.line().parse().expect("a number")
    }

    /// Ends it. Returns how often it asked, and how often in vain.
    fn end(mut self) -> (u64, u64) {
        drop(self.input.take());
        let line = self.line();
        let (asked, failed) = line.split_once(' ').expect("two numbers");
        (
            asked.parse().expect("a number"),
            failed.parse().expect("a number"),
        )
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// An agent in a container.
struct Agent<'a, 'b> {
    container: Container<'a, 'b>,
}

impl Agent<'_, '_> {
    /// Runs a command where the agent runs, as `kubectl exec` would.
    fn exec(&self, words: &[&str]) -> Output {
        let pid = self.container.pid.to_string();
        let mut command = Command::new("nsenter");
        command.args(["--target", &pid, "--mount", "--cgroup", "--net", WAKEONE]);
        command.args(words).output().expect("nsenter")
    }

    /// The steered groups, by the network namespace that they are in.
    fn groups(&self) -> BTreeMap<u64, Value> {
        let output = self.exec(&["status", "--json"]);
        let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let all = all["groups"].as_array().cloned().unwrap_or_default();
        let steered = all.into_iter().filter(|group| group["steered"] == true);
        let by_network = steered.filter_map(|group| {
            let namespace = group["network"]["namespace"].as_u64()?;
            Some((namespace, group))
        });
        by_network.collect()
    }

    /// Ends it once it has taken over what an earlier one left: a group is steered meanwhile, by that one's programs.
    fn end(self) {
        slowly("it follows each group", || {
            let groups = self.groups();
            groups
                .values()
                .all(|group| group["supervisor_pid"].is_number())
        });
        self.container.end();
    }

    fn steers(&self, pod: &Pod<'_, '_>) -> bool {
        let groups = self.groups();
        let group = groups.get(&pod.container.network);
        // The kernel gives the number of a namespace that ended to the next.
        group.is_some_and(|group| group["network"]["container"] == pod.container.id.as_str())
    }

    /// The open connections of a pod's workers.
    fn open(&self, pod: &Pod<'_, '_>) -> Vec<u64> {
        let groups = self.groups();
        let Some(group) = groups.get(&pod.container.network) else {
            panic!("{:?} is not steered: {}", pod.kind, self.container.log());
        };
        assert_eq!(group["network"]["container"], pod.container.id.as_str());
        let slots = group["slots"].as_array().expect("slots").iter();
        let served = slots.filter(|slot| slot["pid"].is_number());
        served.filter_map(|slot| slot["active"].as_u64()).collect()
    }

    fn assert_even(&self, pod: &Pod<'_, '_>) {
        let mut open = Vec::new();
        // The connections of one queue are counted now and then.
        slowly("all are counted", || {
            open = self.open(pod);
            open.iter().sum::<u64>() == KEPT as u64
        });
        let fair = KEPT as f64 / open.len() as f64;
        let most = *open.iter().max().expect("a worker") as f64;
        assert!(most / fair <= 1.1, "{:?} {open:?}", pod.kind);
    }
}

/// Nothing of ours is left on the node.
fn assert_nothing_left(node: &Node) {
    let files = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let left = files(&node.at("node"));
    let left: Vec<_> = left.iter().filter(|one| one.is_dir()).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!node.at("bpf/wakeone").exists());
}

#[test]
fn an_agent_in_a_container_steers_servers_of_five_kinds_in_theirs() {
    let Some(node) = Node::new() else { return };
    let agent = node.agent("agent", WAKEONE, None);
    let names = ["a", "b", "c", "d", "e"];
    let mut pods = Vec::new();
    for (name, kind) in names.into_iter().zip(KINDS) {
        pods.push(node.pod(name, kind));
    }
    for pod in &pods {
        slowly(&format!("{:?} is steered", pod.kind), || agent.steers(pod));
    }
    let mut clients = keep(&pods);
    for pod in &pods {
        agent.assert_even(pod);
    }
    // The next build takes over from one that was killed, and steers on.
    let build = node.at("next-build");
    std::fs::copy(WAKEONE, &build).expect("copy");
    agent.container.kill();
    let agent = node.agent("next", build.to_str().expect("text"), None);
    for pod in &pods {
        slowly(&format!("{:?} is steered again", pod.kind), || {
            agent.steers(pod)
        });
        agent.assert_even(pod);
    }
    assert!(clients.iter_mut().all(|client| client.ask() == 0));
    agent.end();
    assert_nothing_left(&node);
    assert!(clients.iter_mut().all(|client| client.ask() == 0));
}

/// So many containers are replaced at least.
const REPLACED: usize = 12;
/// How long after a server answers its group may not be steered yet.
const STEERED_WITHIN: Duration = Duration::from_secs(1);

/// Waits until a pod that has just been started is steered. Returns how long after its first answer that was.
fn steered_after(agent: &Agent<'_, '_>, pod: &Pod<'_, '_>) -> Duration {
    slowly("it answers", || {
        let mut first = pod.client("kept", &[1, 0]);
        first.line() == "open"
    });
    let answered = Instant::now();
    slowly("it is steered", || agent.steers(pod));
    let took = answered.elapsed();
    println!("{:?} is steered after {took:?}", pod.kind);
    took
}

#[test]
#[ignore = "a minute of containers that come and go"]
fn twenty_containers_come_and_go_under_load_and_nothing_is_lost() {
    let Some(node) = Node::new() else { return };
    let builds = [0, 1].map(|n| {
        let build = node.at(&format!("build-{n}"));
        std::fs::copy(WAKEONE, &build).expect("copy");
        build.to_str().expect("text").to_owned()
    });
    let names: Vec<String> = (0..20).map(|n| format!("pod-{n}")).collect();
    let mut agent = node.agent("agent", &builds[0], None);
    let mut slowest = Duration::ZERO;
    let mut pods = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let pod = node.pod(name, KINDS[number % KINDS.len()]);
        slowest = slowest.max(steered_after(&agent, &pod));
        pods.push(pod);
    }
    println!("twenty pods: each steered within {slowest:?}");
    {
        let mut kept = keep(&pods);
        pods.iter().for_each(|pod| agent.assert_even(pod));
        assert!(kept.iter_mut().all(|client| client.ask() == 0));
    }
    // With more, an emulated CPU has no time left for the agent.
    let gap_ms = 150 * slowness() as usize;
    let mut clients: Vec<Client> = pods
        .iter()
        .map(|pod| pod.client("new", &[gap_ms]))
        .collect();
    let until = Instant::now() + Duration::from_secs(60);
    let (mut turn, mut asked, mut upgrades) = (0, 0, 0);
    // In an emulated machine as many come and go, in a longer time.
    while Instant::now() < until || turn < 7 * REPLACED {
        // One pod is replaced, of another kind each time.
        let number = turn % pods.len();
        let (count, failed) = clients.remove(number).end();
        assert_eq!(failed, 0, "{:?}", pods[number].kind);
        asked += count;
        let (kind, name) = (pods[number].kind, pods[number].container.name);
        match turn % 2 {
            0 => pods.remove(number).container.kill(),
            _ => pods.remove(number).container.end(),
        }
        let pod = node.pod(name, kind);
        slowest = slowest.max(steered_after(&agent, &pod));
        clients.insert(number, pod.client("new", &[gap_ms]));
        pods.insert(number, pod);
        turn += 7;
        // So is the agent, which is killed or ends.
        if turn % 3 == 0 {
            upgrades += 1;
            match upgrades % 2 {
                0 => agent.container.end(),
                _ => agent.container.kill(),
            }
            agent = node.agent("agent", &builds[upgrades % 2], None);
            for pod in &pods {
                slowly("it is steered again", || agent.steers(pod));
            }
        }
    }
    for client in clients {
        let (count, failed) = client.end();
        assert_eq!(failed, 0);
        asked += count;
    }
    println!(
        "{asked} connections, {} pods and {upgrades} agents replaced, none lost; each steered within {slowest:?}",
        turn / 7
    );
    assert!(slowest <= STEERED_WITHIN * slowness(), "{slowest:?}");
    agent.end();
    assert_nothing_left(&node);
}

impl Kind {
    /// The name by which operators know it.
    fn told(self) -> &'static str {
        match self {
            Self::NginxReuseport => "nginx with `reuseport`",
            Self::Nginx => "nginx as packaged",
            Self::Gunicorn => "gunicorn",
            Self::Uvicorn => "uvicorn",
            Self::Unbound => "unbound",
        }
    }
}

/// How long an agent has for what it can do.
const SETTLES: Duration = Duration::from_secs(5);

/// Lists the abilities of an agent without a capability: the features that doctor finds in its container, and the servers that it steers.
fn abilities(node: &Node, pods: &[Pod<'_, '_>], without: Option<&str>) -> Vec<String> {
    let agent = node.agent("agent", WAKEONE, without);
    let begun = Instant::now();
    while begun.elapsed() < SETTLES * slowness() && agent.groups().len() < pods.len() {
        std::thread::sleep(Duration::from_millis(100));
    }
    let doctor = ["exec", "agent", WAKEONE, "doctor", "--self", "--json"];
    let output = node.podman(&doctor).output().expect("podman");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let features = found["features"].as_array().expect("features").iter();
    let features = features.filter(|one| one["available"] == true);
    let features = features
        .filter_map(|one| one["about"].as_str())
        .map(str::to_owned);
    let steered = agent.groups();
    let servers = pods
        .iter()
        .filter(|pod| steered.contains_key(&pod.container.network));
    let servers = servers.map(|pod| format!("steering {}", pod.kind.told()));
    let all = features.chain(servers).collect();
    agent.container.end();
    all
}

/// The kernel of the table of capabilities: the first one that steers.
const DOCUMENTED: &str = "6.1.";

#[test]
#[ignore = "an agent for each capability"]
fn each_capability_that_is_taken_away_takes_what_the_docs_say() {
    let release = uname().expect("the kernel's release");
    if !release.release().to_string_lossy().starts_with(DOCUMENTED) {
        return eprintln!("skipped: the table in docs/fleet.md is that of Linux {DOCUMENTED}x");
    }
    let Some(node) = Node::new() else { return };
    let names = ["a", "b", "c", "d", "e"];
    let pods = names.into_iter().zip(KINDS);
    let pods: Vec<Pod<'_, '_>> = pods.map(|(name, kind)| node.pod(name, kind)).collect();
    let whole = abilities(&node, &pods, None);
    let servers = whole.iter().filter(|one| one.starts_with("steering "));
    assert_eq!(servers.count(), KINDS.len(), "{whole:?}");
    let fleet = format!("{}/../../docs/fleet.md", env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_to_string(fleet).expect("docs");
    let (options, _) = node.manifest();
    let capabilities = options
        .iter()
        .filter_map(|option| option.strip_prefix(ADDED))
        .filter(|name| is_ours(name));
    let row = |name: &str| {
        let left = abilities(&node, &pods, Some(name));
        let lost: Vec<&str> = whole
            .iter()
            .filter(|one| !left.contains(one))
            .map(String::as_str)
            .collect();
        let lost = match lost.is_empty() {
            true => "nothing here".to_owned(),
            false => lost.join("; "),
        };
        format!("| `{name}` | {lost} |")
    };
    let rows: Vec<String> = capabilities.map(row).collect();
    println!("{}", rows.join("\n"));
    for row in rows {
        assert!(
            docs.lines().any(|line| line == row),
            "docs/fleet.md has not: {row}"
        );
    }
    assert_nothing_left(&node);
}
