//! Errors that keep a load from being run at all; a request that fails is an [`ErrorKind`](crate::ErrorKind) instead.

/// Why a plan could not be run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The plan contradicts itself or requires something impossible; the text is the whole sentence.
    #[error("{0}")]
    Plan(String),
    /// The kernel refused something the engine itself needs (not a request).
    #[error("cannot {what}: {source}")]
    System {
        /// The operation that was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl Error {
    /// For `map_err`: `what` is the operation that was tried.
    pub(crate) fn system<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System {
            what,
            source: source.into(),
        }
    }
}
