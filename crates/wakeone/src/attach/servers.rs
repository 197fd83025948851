//! Which servers a target of the agent means, whatever the address: by their processes, cgroups and users, and by their own
//! wish.

use glob::Pattern;
use wakeone_control::policy::Policy;
use wakeone_kernel::proc::{process, stat, waits};
use wakeone_observe::Found;

/// The environment variable by which a server asks to be steered: it names a policy, or is `yes`.
pub const WISH: &str = "WAKEONE";
/// A wish is no longer.
const MOST_OF_A_WISH: usize = 64;

/// The marks that the servers of a target have in common. A mark that is not given fits all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Servers {
    /// The path of the executable.
    pub exe: Option<Pattern>,
    /// The name of the process.
    pub process: Option<Pattern>,
    /// The path of its cgroup.
    pub cgroup: Option<Pattern>,
    /// The user who made the sockets.
    pub user: Option<u32>,
    /// It has [`WISH`] in its environment.
    pub wishing: bool,
    /// It may be in any network namespace of the machine.
    pub everywhere: bool,
}

impl Servers {
    /// Whether only the address matters.
    pub fn is_any(&self) -> bool {
        let everywhere = self.everywhere;
        *self
            == Self {
                everywhere,
                ..Self::default()
            }
    }

    /// Whether a listener is that of such a server: one of the processes that hold it fits.
    pub fn fit(&self, found: &Found) -> bool {
        let mut sockets = found.listener.sockets.iter();
        let of_user = self
            .user
            .is_none_or(|user| sockets.all(|one| one.uid == user));
        let by_process = self.exe.is_some() || self.process.is_some() || self.cgroup.is_some();
        of_user && (!by_process || found.pids.iter().any(|pid| self.fits(*pid)))
    }

    fn fits(&self, pid: u32) -> bool {
        let fits = |pattern: &Option<Pattern>, text: &dyn Fn() -> Option<String>| match pattern {
            None => true,
            Some(pattern) => text().is_some_and(|text| pattern.matches(&text)),
        };
        fits(&self.exe, &|| process::executable(pid))
            && fits(&self.process, &|| waits::identity(pid).map(|who| who.name))
            && fits(&self.cgroup, &|| cgroup(pid))
    }
}

/// The path of a process's cgroup, in cgroup2 or else the first hierarchy. In a cgroup namespace it begins where that does, or
/// above.
fn cgroup(pid: u32) -> Option<String> {
    let text = stat::text_of(pid, "cgroup").ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("0::"))
        .or_else(|| text.lines().next())?;
    line.splitn(3, ':')
        .nth(2)
        .map(|path| below(path).to_owned())
}

/// The part of a path that does not lead up, as that to a cgroup outside of our namespace does: `/../../system.slice/…`.
fn below(path: &str) -> &str {
    match path.strip_prefix("/..") {
        Some(rest) if rest.starts_with('/') => below(rest),
        _ => path,
    }
}

/// Returns what a listener's server wishes, by the first of its processes that has a wish: a policy, or `None` for the
/// default one.
///
/// # Errors
/// The wish cannot be understood, as one sentence.
pub(super) fn wish(found: &Found) -> Option<Result<Option<Policy>, String>> {
    let text = |pid: &u32| {
        let environment = stat::text_of(*pid, "environ").ok()?;
        Some((*pid, wished(&environment)?.to_owned()))
    };
    let (pid, wish) = found.pids.iter().find_map(text)?;
    let policy = understood(&wish);
    Some(policy.map_err(|why| {
        format!(
            "{} is left as it is: process {pid} has {WISH} in its environment, and {why}",
            found.listener.address
        )
    }))
}

fn wished(environment: &str) -> Option<&str> {
    let mut variables = environment.split('\0');
    let wish = variables.find_map(|one| one.strip_prefix(WISH)?.strip_prefix('='))?;
    let end = wish.char_indices().nth(MOST_OF_A_WISH);
    Some(end.map_or(wish, |(end, _)| &wish[..end]))
}

fn understood(wish: &str) -> Result<Option<Policy>, String> {
    match wish {
        "yes" | "1" | "true" => Ok(None),
        name => name.escape_default().to_string().parse().map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_is_read_as_hostile_input() {
        let environment = "PATH=/bin\0WAKEONE=least-connections\0A=b\0";
        let wish = wished(environment).expect("a wish");
        assert_eq!(understood(wish), Ok(Some(Policy::LeastConnections)));
        assert_eq!(understood("yes"), Ok(None));
        assert_eq!(wished("WAKEONE_BPFFS=/x\0XWAKEONE=yes\0"), None);
        assert_eq!(wished(""), None);
        let long = format!("WAKEONE={}\0", "\u{fffd}".repeat(1000));
        let wish = wished(&long).expect("a wish");
        assert_eq!(wish.chars().count(), MOST_OF_A_WISH);
        let why = understood(wish).expect_err("no policy");
        assert!(why.len() < 1000, "{why}");
    }

    #[test]
    fn a_cgroup_outside_of_our_namespace_is_told_by_its_own_path() {
        assert_eq!(below("/../../system.slice/a"), "/system.slice/a");
        assert_eq!(below("/..a/b"), "/..a/b");
        assert_eq!(below("/"), "/");
    }

    #[test]
    fn a_target_without_marks_means_everybody() {
        assert!(Servers::default().is_any());
        let everywhere = Servers {
            everywhere: true,
            ..Servers::default()
        };
        assert!(everywhere.is_any());
        let wishing = Servers {
            wishing: true,
            ..Servers::default()
        };
        assert!(!wishing.is_any());
    }
}
