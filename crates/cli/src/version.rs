//! The sources that this program was built from.

use std::sync::LazyLock;

use wakeone_result::COMMIT;

/// Version, commit and libbpf in a line.
pub fn text() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let libbpf = wakeone_bpf::abilities::libbpf_version();
        format!(
            "{} (commit {COMMIT}, libbpf {libbpf})",
            env!("CARGO_PKG_VERSION")
        )
    });
    &TEXT
}
