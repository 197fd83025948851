//! `wakeone doctor --self`: reports the features that this kernel and these privileges allow Wakeone.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::LazyLock;

use serde_json::json;
use wakeone_bpf::abilities::{self, Ability, Missing};

use wakeone_terminal::{print, print_json};

/// Columns of a terminal that is not known to be wider.
const COLUMNS: usize = 80;
/// The width of what stands before each feature.
const INDENT: usize = 9;

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
        let is_root = rustix::process::geteuid().is_root();
        print(&(head + &text(&abilities, is_root)))?;
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
        "why": ability.missing.as_ref().map(Missing::to_string),
        "lacks_capabilities": matches!(ability.missing, Some(Missing::Capabilities(_))),
    })
}

/// A line for each feature, and the reason below it if the feature is missing. A feature that another user than root has no
/// rights for is not called missing.
fn text(abilities: &[Ability], is_root: bool) -> String {
    let mut text = String::new();
    let mut last = None;
    let (mut missing, mut as_root) = (0, BTreeSet::new());
    let mut works = 0;
    for ability in abilities {
        let (there, why) = match &ability.missing {
            None => ("yes", None),
            Some(Missing::Capabilities(names)) if !is_root => {
                as_root.extend(names.iter().map(String::as_str));
                ("as root:", None)
            }
            why => ("no", why.as_ref()),
        };
        works += usize::from(ability.missing.is_none());
        text.push_str(&format!("{there:<INDENT$}{}\n", ability.about));
        if let Some(why) = why {
            missing += 1;
            let again = last == Some(why);
            let why = if again {
                "for the same reason".to_owned()
            } else {
                why.to_string()
            };
            for line in wrapped(&why, COLUMNS - INDENT) {
                text.push_str(&format!("{:INDENT$}{line}\n", ""));
            }
        }
        last = why;
    }
    text.push('\n');
    let all = abilities.len();
    let left = all - works - missing;
    let mut sums = match missing {
        0 if left == 0 => "Everything works here.".to_owned(),
        0 => format!("{works} of {all} features work for you."),
        n => format!("{n} of {all} features are missing here."),
    };
    if left > 0 {
        let names: Vec<&str> = as_root.into_iter().collect();
        sums.push_str(&format!(
            " As root: {left} more, where this kernel has them; `sudo wakeone doctor --self` tries them. They need {}.",
            names.join(", ")
        ));
    }
    for line in wrapped(&sums, COLUMNS) {
        text.push_str(&line);
        text.push('\n');
    }
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

    fn one(about: &'static str, missing: Option<Missing>) -> Ability {
        Ability {
            name: "x",
            about,
            missing,
        }
    }

    #[test]
    fn a_missing_feature_has_its_reason_below_it() {
        let long = "the kernel refused it for a reason that takes many more words than would ever fit on one line";
        let here = Some(Missing::Here(long.to_owned()));
        let told = text(
            &[
                one("first", None),
                one("second", here.clone()),
                one("third", here),
            ],
            false,
        );
        let expected = "yes      first\nno       second\n         \
            the kernel refused it for a reason that takes many more words than\n         \
            would ever fit on one line\nno       third\n         for the same reason\n\n\
            2 of 3 features are missing here.\n";
        assert_eq!(told, expected);
        assert!(told.lines().all(|line| line.chars().count() <= COLUMNS));
        assert_eq!(
            text(&[one("a", None)], false),
            "yes      a\n\nEverything works here.\n"
        );
    }

    #[test]
    fn a_user_is_told_what_root_could_do_and_root_what_it_lacks() {
        let lacks = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            Some(Missing::Capabilities(names))
        };
        let abilities = [
            one("first", None),
            one("second", lacks(&["CAP_BPF", "CAP_PERFMON"])),
            one("third", lacks(&["CAP_BPF"])),
        ];
        assert_eq!(
            text(&abilities, false),
            "yes      first\nas root: second\nas root: third\n\n\
             1 of 3 features work for you. As root: 2 more, where this kernel has them; `sudo\n\
             wakeone doctor --self` tries them. They need CAP_BPF, CAP_PERFMON.\n"
        );
        let told = text(&abilities, true);
        assert!(
            told.contains("no       second\n         it needs CAP_BPF and CAP_PERFMON\n"),
            "{told}"
        );
        assert!(
            told.ends_with("2 of 3 features are missing here.\n"),
            "{told}"
        );
    }
}
