//! `make install-files` puts each file into its place, and `make uninstall` leaves none.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Stands for the command, which the test only copies.
const BINARY: &str = env!("CARGO_BIN_EXE_wakeone-manual");

struct Place {
    folder: tempfile::TempDir,
    prefix: &'static str,
    laboratory: bool,
}

impl Place {
    fn new(prefix: &'static str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let place = Self {
            folder,
            prefix,
            laboratory: true,
        };
        let written = Command::new(BINARY).arg(place.manual()).status();
        assert!(written.expect("the manual").success());
        place
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn manual(&self) -> PathBuf {
        self.folder.path().join("manual")
    }

    fn make(&self, goal: &str) -> Output {
        let output = Command::new("make")
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
            .env_remove("MAKEFLAGS")
            .arg(goal)
            .arg(format!("PREFIX={}", self.prefix))
            .arg(format!("DESTDIR={}", self.root().display()))
            .arg(format!("WAKEONE={BINARY}"))
            .arg(format!("LAB={}", if self.laboratory { BINARY } else { "" }))
            .arg(format!("MANUAL={}", self.manual().display()))
            .output()
            .expect("make");
        assert!(output.status.success(), "{output:?}");
        output
    }

    /// Files, from the root on.
    fn files(&self) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        collect(&self.root(), &self.root(), &mut found);
        found
    }

    fn read(&self, file: &str) -> String {
        let text = fs::read_to_string(self.root().join(file));
        text.unwrap_or_else(|error| panic!("{file}: {error}"))
    }
}

fn collect(root: &Path, folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(root, &path, found);
        } else {
            let name = path.strip_prefix(root).expect("below the root");
            found.insert(name.display().to_string());
        }
    }
}

#[test]
fn all_is_installed_and_nothing_stays() {
    for (prefix, zsh) in [
        ("/opt/wakeone", "share/zsh/site-functions"),
        ("/usr", "share/zsh/vendor-completions"),
    ] {
        let place = Place::new(prefix);
        place.make("install-files");
        let files = place.files();
        let within = &prefix[1..];
        for file in [
            "bin/wakeone",
            "bin/wakeone-lab",
            "share/man/man1/wakeone-lab-run.1",
            "share/bash-completion/completions/wakeone-lab",
            "share/man/man1/wakeone.1",
            "share/man/man1/wakeone-run.1",
            "share/bash-completion/completions/wakeone",
            "share/fish/vendor_completions.d/wakeone.fish",
            &format!("{zsh}/_wakeone"),
            "share/wakeone/grafana-dashboard.json",
            "share/wakeone/prometheus-alerts.yaml",
            "lib/systemd/system/wakeone-one@.service",
            "lib/systemd/system/wakeone-run@.service",
            "lib/systemd/system/wakeone-server@.service",
        ] {
            let there = files.contains(&format!("{within}/{file}"));
            assert!(there, "{file} is not in {files:?}");
        }
        let unit = format!("{within}/lib/systemd/system/wakeone-agent.service");
        let starts = format!("ExecStart={prefix}/bin/wakeone agent ");
        assert!(place.read(&unit).contains(&starts));
        assert!(place.read("etc/wakeone/agent.toml").contains("#[[target]]"));
        let size = |path: &Path| fs::metadata(path).expect("a file").len();
        let installed = place.root().join(within).join("bin/wakeone");
        assert!(
            size(&installed) < size(Path::new(BINARY)),
            "it is not stripped"
        );
        place.make("uninstall");
        assert_eq!(place.files(), BTreeSet::new());
        assert!(!place.root().join("etc/wakeone").exists());
        assert!(!place.root().join(within).join("share/wakeone").exists());
        // Folders that are a system's own stay, empty or not.
        assert!(place.root().join(within).join("bin").exists());
    }
}

#[test]
fn the_laboratory_is_left_out_on_request() {
    let mut place = Place::new("/usr/local");
    place.laboratory = false;
    place.make("install-files");
    let files = place.files();
    assert!(files.contains("usr/local/bin/wakeone"), "{files:?}");
    let of_lab = files.iter().find(|file| file.contains("wakeone-lab"));
    assert_eq!(of_lab, None);
}

#[test]
fn a_configuration_of_somebody_is_kept() {
    let place = Place::new("/usr/local");
    place.make("install-files");
    let config = place.root().join("etc/wakeone/agent.toml");
    fs::write(&config, "[[target]]\nlisten = \":8080\"\n").expect("a change");
    place.make("install-files");
    assert!(place.read("etc/wakeone/agent.toml").contains(":8080"));
    let told = place.make("uninstall");
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.contains("agent.toml, which was changed"), "{told}");
    let left = BTreeSet::from(["etc/wakeone/agent.toml".to_owned()]);
    assert_eq!(place.files(), left);
}
