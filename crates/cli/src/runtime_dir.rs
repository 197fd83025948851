//! The option that tells commands where groups keep their state.

use std::path::PathBuf;

use wakeone_control::paths::Paths;
use wakeone_control::state::default_runtime_dir;

/// Where groups keep their state.
#[derive(Debug, Clone, clap::Args)]
pub struct RuntimeDir {
    /// Where groups keep their state [default: $WAKEONE_RUNTIME_DIR, else /run/wakeone of root, else a folder of your own]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

impl RuntimeDir {
    /// The folder itself.
    pub fn dir(&self) -> PathBuf {
        self.runtime_dir.clone().unwrap_or_else(default_runtime_dir)
    }

    /// The folders of all groups.
    pub fn paths(&self) -> Paths {
        Paths::of(&self.dir())
    }
}
