//! `wakeone doctor --self`: reports the features that this kernel and these privileges allow Wakeone.

use std::process::ExitCode;
use std::sync::LazyLock;

use serde_json::json;
use wakeone_bpf::abilities::{self, Ability};

use wakeone_terminal::{print, print_json};

/// Columns of a terminal that is not known to be wider.
const COLUMNS: usize = 80;
/// The longest `about`, and "yes  " before it.
const INDENT: usize = 5;

/// Version, commit and libbpf in a line.
pub fn version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let (version, commit) = (env!("CARGO_PKG_VERSION"), wakeone_result::COMMIT);
        let libbpf = abilities::libbpf_version();
        format!("{version} (commit {commit}, libbpf {libbpf})")
    });
    &TEXT
}

/// Tries each feature and reports. The exit code is 1 if one is missing.
pub fn run(as_json: bool) -> anyhow::Result<ExitCode> {
    let abilities = abilities::find();
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let whole = abilities.iter().all(|ability| ability.missing.is_none());
    if as_json {
        let features: Vec<_> = abilities.iter().map(feature).collect();
        let report = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "commit": wakeone_result::COMMIT,
            "libbpf": abilities::libbpf_version(),
            "kernel": release,
            "complete": whole,
            "features": features,
        });
        print_json(&report)?;
    } else {
        let head = format!("wakeone {} on Linux {release}\n\n", version());
        print(&(head + &text(&abilities)))?;
    }
    Ok(match whole {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn feature(ability: &Ability) -> serde_json::Value {
    json!({
        "name": ability.name,
        "about": ability.about,
        "available": ability.missing.is_none(),
        "why": ability.missing,
    })
}

/// A line for each feature, and the reason below it if the feature is missing.
fn text(abilities: &[Ability]) -> String {
    let mut text = String::new();
    let mut last = None;
    for ability in abilities {
        let there = if ability.missing.is_none() {
            "yes"
        } else {
            "no"
        };
        text.push_str(&format!("{there:<INDENT$}{}\n", ability.about));
        if let Some(why) = &ability.missing {
            let again = last == Some(why);
            let why = if again { "for the same reason" } else { why };
            for line in wrapped(why, COLUMNS - INDENT) {
                text.push_str(&format!("{:INDENT$}{line}\n", ""));
            }
        }
        last = ability.missing.as_ref();
    }
    let missing = abilities.iter().filter(|one| one.missing.is_some()).count();
    text.push('\n');
    text.push_str(&match missing {
        0 => "Everything works here.\n".to_owned(),
        n => format!("{n} of {} features are missing here.\n", abilities.len()),
    });
    text
}

/// Wraps a text to lines of at most this many characters; a longer word has a line of its own.
fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_feature_has_its_reason_below_it() {
        let one = |about, missing: Option<&str>| Ability {
            name: "x",
            about,
            missing: missing.map(str::to_owned),
        };
        let long =
            "it needs CAP_BPF and CAP_PERFMON and many more words than would ever fit on one line";
        let told = text(&[
            one("first", None),
            one("second", Some(long)),
            one("third", Some(long)),
        ]);
        let expected = "yes  first\nno   second\n     \
            it needs CAP_BPF and CAP_PERFMON and many more words than would ever fit on\n     \
            one line\nno   third\n     for the same reason\n\n2 of 3 features are missing here.\n";
        assert_eq!(told, expected);
        assert!(told.lines().all(|line| line.chars().count() <= COLUMNS));
        assert_eq!(
            text(&[one("a", None)]),
            "yes  a\n\nEverything works here.\n"
        );
    }
}
