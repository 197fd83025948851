//! The error of an experiment.

/// The reason why an experiment failed: one sentence for the user, with the next step where that is known.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A server under test did not start, did not become ready, or did not stop.
    #[error("{0}")]
    Server(String),
    /// `wakeone attach` did not attach, and said why.
    #[error("{0}")]
    Refused(String),
    /// The load could not be sent.
    #[error("the load on {target} failed: {source}")]
    Load {
        /// The address that the load went to.
        target: Box<wakeone_model::address::Address>,
        /// The load generator's error.
        source: wakeone_load::Error,
    },
    /// The server's own count of its answers and the client's contradict each other; see [`answers`].
    #[error(
        "{what} counted {made} answers, but its clients got {whole} and gave up on {open}: requests were lost or counted twice; \
         measure again, and report it if it comes again"
    )]
    Counts {
        /// The server.
        what: String,
        /// Answers that it made.
        made: u64,
        /// Answers that clients got whole.
        whole: u64,
        /// Requests that were sent and got no whole answer.
        open: u64,
    },
    /// A file could not be read or written.
    #[error("{action} {path} failed: {source}")]
    File {
        /// `reading` or `writing`.
        action: &'static str,
        /// The file.
        path: std::path::PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A result file is not one, or of another version.
    #[error("{path} is not a lab result: {source}; measure it again with `wakeone-lab run`")]
    Format {
        /// The file.
        path: std::path::PathBuf,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// No experiment has this name.
    #[error("there is no experiment {0:?}; `wakeone-lab list` shows them")]
    Unknown(String),
    /// A chart could not be drawn.
    #[error("drawing a chart failed: {0}")]
    Chart(String),
    /// This machine lacks something that the experiment needs.
    #[error("{0}")]
    Missing(String),
    /// Ctrl-C or SIGTERM; finished points are kept.
    #[error("interrupted; finished points are kept, the same command goes on from there")]
    Interrupted,
}

/// The result of a thread that was joined; one that panicked has failed.
///
/// # Errors
/// The thread's own, or that it panicked.
pub fn joined<T>(thread: std::thread::Result<Result<T, Error>>) -> Result<T, Error> {
    thread.unwrap_or_else(|_| Err(Error::Server("a thread of the experiment panicked".into())))
}
