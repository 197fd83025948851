//! What failed when programs and maps were loaded, pinned or opened.

use std::io;

/// A step of loading that failed, and the kernel's answer.
#[derive(Debug, thiserror::Error)]
#[error("{step} failed: {source}")]
pub struct Error {
    /// The step that was tried.
    pub step: String,
    /// The kernel's error.
    pub source: io::Error,
}

impl Error {
    pub(crate) fn at<E: Into<io::Error>>(step: impl Into<String>) -> impl FnOnce(E) -> Self {
        let step = step.into();
        move |source| Self {
            step,
            source: source.into(),
        }
    }
}

pub(crate) fn from_bpf(error: &libbpf_rs::Error) -> io::Error {
    match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => io::Error::from_raw_os_error(nix::libc::EPERM),
        libbpf_rs::ErrorKind::NotFound => io::Error::from_raw_os_error(nix::libc::ENOENT),
        _ => io::Error::other(error.to_string()),
    }
}

/// Converts libbpf's error of a step, naming both; keeps the kind `PermissionDenied`.
pub(crate) fn failed(step: &str, error: &libbpf_rs::Error) -> io::Error {
    let kind = match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, format!("{step} failed: {error}"))
}

pub(crate) fn bpf_step(step: impl Into<String>) -> impl FnOnce(libbpf_rs::Error) -> Error {
    let step = step.into();
    move |source| Error {
        step,
        source: from_bpf(&source),
    }
}

/// The beginning of the step that gives a program to the verifier.
pub(crate) const LOADING: &str = "loading the program ";

impl Error {
    /// Whether a program did not load: it will not load the next time either.
    pub fn is_load(&self) -> bool {
        self.step.starts_with(LOADING)
    }
}
