//! The store of results: one file an experiment, and beside it the finished points of a run that was interrupted.

use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::experiment::Sample;
use crate::result::Outcome;

/// A directory of results.
#[derive(Debug, Clone)]
pub struct Store {
    directory: PathBuf,
}

/// Finished points of a run: `(round, variant, what was measured)`.
pub type Points = Vec<(usize, String, Sample)>;

/// The file of an unfinished run. Its points count only for a run of the same parameters and the same build.
#[derive(Debug, Serialize, Deserialize)]
struct Partial {
    parameters: serde_json::Map<String, serde_json::Value>,
    commit: String,
    points: Points,
}

impl Store {
    /// A store in this directory, which is made with the first file.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
        }
    }

    /// The user's own: `$XDG_STATE_HOME/wakeone/lab`, `~/.local/state/wakeone/lab`, else `wakeone-lab` here.
    pub fn default_directory() -> PathBuf {
        let set = |name: &str| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        set("XDG_STATE_HOME")
            .or_else(|| Some(set("HOME")?.join(".local/state")))
            .map_or_else(
                || PathBuf::from("wakeone-lab"),
                |base| base.join("wakeone/lab"),
            )
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Keeps a result and drops the points that led to it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn keep(&self, outcome: &Outcome) -> Result<PathBuf, Error> {
        let path = self.directory.join(format!("{}.json", outcome.experiment));
        write_json(&path, outcome)?;
        let _ = fs::remove_file(self.partial(&outcome.experiment));
        Ok(path)
    }

    /// All results, by name of the experiment; files that are not results are errors.
    ///
    /// # Errors
    /// When the directory or a result in it cannot be read.
    pub fn all(&self) -> Result<Vec<Outcome>, Error> {
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => {
                return Err(Error::File {
                    action: "reading",
                    path: self.directory.clone(),
                    source,
                });
            }
        };
        let mut paths: Vec<PathBuf> = entries
            .flatten()
            .map(|e| e.path())
            .filter(|p| {
                p.extension().is_some_and(|e| e == "json")
                    && !p.to_string_lossy().ends_with(".partial.json")
            })
            .collect();
        paths.sort();
        paths.iter().map(|p| read(p)).collect()
    }

    /// The finished points of an interrupted run of the same parameters and build; none where there are none.
    pub fn points(
        &self,
        experiment: &str,
        parameters: &serde_json::Map<String, serde_json::Value>,
    ) -> Points {
        let kept = fs::read(self.partial(experiment))
            .ok()
            .and_then(|b| serde_json::from_slice::<Partial>(&b).ok());
        kept.filter(|p| p.parameters == *parameters && p.commit == wakeone_result::COMMIT)
            .map_or_else(Vec::new, |p| p.points)
    }

    /// Keeps the finished points of a run that goes on.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn keep_points(
        &self,
        experiment: &str,
        parameters: &serde_json::Map<String, serde_json::Value>,
        points: &Points,
    ) -> Result<(), Error> {
        let partial = Partial {
            parameters: parameters.clone(),
            commit: wakeone_result::COMMIT.into(),
            points: points.clone(),
        };
        write_json(&self.partial(experiment), &partial)
    }

    /// Forgets the points of an unfinished run.
    pub fn forget_points(&self, experiment: &str) {
        let _ = fs::remove_file(self.partial(experiment));
    }

    fn partial(&self, experiment: &str) -> PathBuf {
        self.directory.join(format!("{experiment}.partial.json"))
    }
}

/// Reads one result file.
///
/// # Errors
/// When it cannot be read or is not a result.
pub fn read(path: &Path) -> Result<Outcome, Error> {
    let text = fs::read(path).map_err(|source| Error::File {
        action: "reading",
        path: path.into(),
        source,
    })?;
    serde_json::from_slice(&text).map_err(|source| Error::Format {
        path: path.into(),
        source,
    })
}

/// Writes a file beside its place and renames it, so that no reader sees half of it.
///
/// # Errors
/// When it cannot be written.
pub fn write(path: &Path, text: &str) -> Result<(), Error> {
    let failed = |source| Error::File {
        action: "writing",
        path: path.into(),
        source,
    };
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    // A rename can only replace a plain file, not a pipe or /dev/stdout.
    if fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        return fs::write(path, text).map_err(failed);
    }
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    fs::write(&name, text).map_err(failed)?;
    fs::rename(&name, path).map_err(failed)
}

/// Writes a value as JSON that a person can read.
///
/// # Errors
/// When it cannot be written.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::File {
        action: "writing",
        path: path.into(),
        source: e.into(),
    })?;
    write(path, &(text + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_count_only_for_the_same_parameters() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::at(directory.path().join("deep/er"));
        let parameters = serde_json::json!({"seed": 1}).as_object().unwrap().clone();
        let mut sample = Sample::default();
        sample.put("x", "ms", 1.5);
        let points = vec![(0, "a".to_owned(), sample)];
        assert!(store.points("e", &parameters).is_empty());
        store.keep_points("e", &parameters, &points).unwrap();
        assert_eq!(store.points("e", &parameters), points);
        let others = serde_json::json!({"seed": 2}).as_object().unwrap().clone();
        assert!(store.points("e", &others).is_empty());
        assert!(
            store.all().unwrap().is_empty(),
            "an unfinished run is no result"
        );
    }

    #[test]
    fn a_file_that_is_no_result_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.json");
        std::fs::write(&path, "{}").unwrap();
        let message = read(&path).unwrap_err().to_string();
        assert!(message.contains("x.json is not a lab result"), "{message}");
    }
}
