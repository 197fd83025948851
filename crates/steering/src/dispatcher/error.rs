//! Why a group is not steered.

use wakeone_bpf as bpf;
use wakeone_kernel::capability;

use wakeone_control::policy::Policy;

/// Why a group is not steered, as one sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is nowhere to pin to.
    #[error("cannot steer `{name}`: {why}")]
    NoBpffs {
        /// The group.
        name: String,
        /// The missing place and the remedy.
        why: String,
    },
    /// Permission is missing.
    #[error(
        "cannot steer `{name}`: {step} was not allowed; it needs {missing}: start as root or with these capabilities, or choose --policy random, cpu or hash, which need none"
    )]
    NotAllowed {
        /// The group.
        name: String,
        /// What was tried.
        step: String,
        /// The capabilities that are missing.
        missing: String,
    },
    /// The policy does not fit the sockets.
    #[error("cannot steer `{name}` by {why}")]
    Unfit {
        /// The group.
        name: String,
        /// The policy, the reason, and what fits.
        why: String,
    },
    /// The policy that was asked for goes by counts that nobody can keep here.
    #[error(
        "cannot steer `{name}` by {policy}: it goes by open connections, which cannot be counted here: {why}; --policy shortest-queue needs no counts"
    )]
    Uncounted {
        /// The group.
        name: String,
        /// The policy that was asked for.
        policy: Policy,
        /// Why they cannot be counted.
        why: String,
    },
    /// Anything else that the kernel refused.
    #[error("cannot steer `{name}`: {0}", .source)]
    Kernel {
        /// The group.
        name: String,
        /// The step and the answer.
        source: bpf::Error,
    },
}

impl Error {
    /// Returns the error that there is no place to pin to. It also names all capabilities that the next steps need, so
    /// that a user learns of them at once.
    pub(super) fn no_place(name: &str, why: String) -> Self {
        let missing = capability::missing();
        let why = match missing.as_slice() {
            [] => why,
            missing => format!(
                "{why}; it also needs {}: start as root or with these capabilities, or choose --policy random, cpu or hash, which need none",
                missing.join(" and ")
            ),
        };
        Self::NoBpffs {
            name: name.to_owned(),
            why,
        }
    }

    /// Whether the kernel refused to load a program. Another attempt would not change that.
    pub fn is_load(&self) -> bool {
        matches!(self, Self::Kernel { source, .. } if source.is_load())
    }

    pub(super) fn of(name: &str) -> impl Fn(bpf::Error) -> Self + '_ {
        move |source| {
            let missing = capability::missing();
            if source.source.kind() == std::io::ErrorKind::PermissionDenied && !missing.is_empty() {
                return Self::NotAllowed {
                    name: name.to_owned(),
                    step: source.step,
                    missing: missing.join(" and "),
                };
            }
            Self::Kernel {
                name: name.to_owned(),
                source,
            }
        }
    }
}
