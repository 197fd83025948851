//! Folders that nobody else can replace.
//!
//! A user who can write to a parent of our folder can put another folder in its place. He can also put a link there,
//! to a folder whose files we would then remove. So each step of a path is opened by itself and checked before the
//! next one.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    Access, AtFlags, CWD, FileType, Mode, OFlags, Stat, accessat, fstat, mkdirat, openat,
    readlinkat,
};
use rustix::io::Errno;

/// As many links as the kernel follows (`MAXSYMLINKS`, include/linux/namei.h).
const MOST_LINKS: usize = 40;
const WRITABLE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Why a folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else owns a step of the path.
    #[error("{path} belongs to user {owner}, who could exchange what is in it")]
    Owner {
        /// The step.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// Others than the owner may write to a step of the path.
    #[error("others than its owner may write to {0}")]
    Writable(PathBuf),
    /// A link that somebody else may have put there.
    #[error("{0} is a link in a folder that others may write to")]
    Link(PathBuf),
    /// A step cannot be opened or made.
    #[error("cannot {what} {path}: {source}")]
    File {
        /// The operation that was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl Error {
    /// Whether there is no such folder.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::File { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(Errno) -> Error {
    let path = path.to_owned();
    move |errno| Error::File {
        what,
        path,
        source: errno.into(),
    }
}

/// Checks that only we and root can replace a folder or anything on the way to it, and that only we can write to it.
///
/// # Errors
/// See [`Error`].
pub fn check(path: &Path) -> Result<(), Error> {
    Walk::along(path)?.finish(false)
}

/// Checks a folder as [`check`] does, and makes the missing part of the path, for us alone.
///
/// # Errors
/// See [`Error`].
pub fn make_private(path: &Path) -> Result<(), Error> {
    Walk::along(path)?.finish(true)
}

/// How far a path has been walked.
struct Walk {
    /// The folder reached.
    at: OwnedFd,
    /// Its path.
    path: PathBuf,
    about: Stat,
    rest: VecDeque<OsString>,
    links: usize,
    /// Users that are trusted beside us.
    root: u32,
}

impl Walk {
    fn along(path: &Path) -> Result<Self, Error> {
        let absolute = std::path::absolute(path).map_err(|source| Error::File {
            what: "find",
            path: path.to_owned(),
            source,
        })?;
        let (at, about) = open_root()?;
        Ok(Self {
            at,
            path: "/".into(),
            root: root_by(&about),
            about,
            rest: steps(&absolute).collect(),
            links: 0,
        })
    }

    fn finish(mut self, make: bool) -> Result<(), Error> {
        while let Some(step) = self.rest.pop_front() {
            self.judge()?;
            self.enter(&step, make)?;
        }
        self.judge()?;
        if self.about.st_uid != own() {
            return Err(self.foreign());
        }
        // Everybody may put something into a sticky folder.
        if self.about.st_mode & WRITABLE_BY_OTHERS != 0 {
            return Err(Error::Writable(self.path));
        }
        Ok(())
    }

    fn foreign(&self) -> Error {
        Error::Owner {
            path: self.path.clone(),
            owner: self.about.st_uid,
        }
    }

    fn judge(&self) -> Result<(), Error> {
        if ![self.root, own()].contains(&self.about.st_uid) {
            return Err(self.foreign());
        }
        // In a sticky folder others cannot replace our entries, and the next step's owner is checked.
        if self.is_writable() && self.about.st_mode & STICKY == 0 {
            return Err(Error::Writable(self.path.clone()));
        }
        Ok(())
    }

    fn is_writable(&self) -> bool {
        self.about.st_mode & WRITABLE_BY_OTHERS != 0
    }

    /// Opens the next step, which may be a link that nobody but root or us can have made.
    fn enter(&mut self, step: &OsString, make: bool) -> Result<(), Error> {
        let path = self.path.join(step);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || openat(&self.at, step, flags, Mode::empty());
        let opened = match open() {
            Err(Errno::NOENT) if make => match mkdirat(&self.at, step, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => open(),
                Err(errno) => return Err(failed("make the folder", &path)(errno)),
            },
            other => other,
        };
        let opened = opened.map_err(failed("open", &path))?;
        let about = fstat(&opened).map_err(failed("look at", &path))?;
        match FileType::from_raw_mode(about.st_mode) {
            FileType::Directory => {
                (self.at, self.about, self.path) = (opened, about, path);
                Ok(())
            }
            FileType::Symlink => self.follow(&opened, &about, path),
            _ => Err(failed("open", &path)(Errno::NOTDIR)),
        }
    }

    fn follow(&mut self, link: &OwnedFd, about: &Stat, path: PathBuf) -> Result<(), Error> {
        // Root's own link can be linked to once more by others, there.
        if self.is_writable() || ![self.root, own()].contains(&about.st_uid) {
            return Err(Error::Link(path));
        }
        self.links += 1;
        if self.links > MOST_LINKS {
            return Err(failed("open", &path)(Errno::LOOP));
        }
        let target = readlinkat(link, "", Vec::new()).map_err(failed("read the link", &path))?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        for step in steps(&target).collect::<Vec<_>>().into_iter().rev() {
            self.rest.push_front(step);
        }
        if target.is_absolute() {
            (self.at, self.about) = open_root()?;
            self.path = "/".into();
        }
        Ok(())
    }
}

/// The number that the machine's root has in our user namespace.
///
/// # Errors
/// `/` cannot be opened.
pub fn root() -> Result<u32, Error> {
    open_root().map(|(_, about)| root_by(&about))
}

/// Where root has no number in our user namespace, the owner of `/` stands for it.
fn root_by(about: &Stat) -> u32 {
    if is_mapped() { 0 } else { about.st_uid }
}

/// Whether we may make this folder, or make something in it if it is there.
pub fn is_possible(path: &Path) -> bool {
    let there = path.ancestors().find(|step| step.exists());
    let flags = AtFlags::EACCESS;
    there.is_some_and(|step| accessat(CWD, step, Access::WRITE_OK | Access::EXEC_OK, flags).is_ok())
}

fn own() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether the machine's root is root here too.
fn is_mapped() -> bool {
    let map = std::fs::read("/proc/self/uid_map").unwrap_or_default();
    let first = map.split(|byte| byte.is_ascii_whitespace());
    let first: Vec<&[u8]> = first.filter(|word| !word.is_empty()).take(3).collect();
    map.is_empty() || first == [&b"0"[..], b"0", b"4294967295"]
}

fn open_root() -> Result<(OwnedFd, Stat), Error> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(CWD, "/", flags, Mode::empty()).map_err(failed("open", Path::new("/")))?;
    let about = fstat(&root).map_err(failed("look at", Path::new("/")))?;
    Ok((root, about))
}

fn steps(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};

    fn with_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("mode");
    }

    #[test]
    fn what_is_missing_is_made_for_us_alone() {
        let place = tempfile::tempdir().expect("folder");
        let path = place.path().join("a/b");
        assert!(check(&path).is_err_and(|error| error.is_missing()));
        make_private(&path).expect("made");
        make_private(&path).expect("there already");
        check(&path).expect("ours");
        let mode = std::fs::metadata(&path).expect("there").permissions();
        assert_eq!(mode.mode() & 0o777, 0o700);
        // A link of ours in a folder of ours, and steps back.
        symlink("a/../a", place.path().join("link")).expect("link");
        check(&place.path().join("link/b")).expect("ours");
        symlink(place.path().join("link"), place.path().join("far")).expect("link");
        check(&place.path().join("far/../a/b")).expect("ours");
        symlink("round", place.path().join("round")).expect("link");
        assert!(matches!(
            check(&place.path().join("round")),
            Err(Error::File { .. })
        ));
        std::fs::write(place.path().join("file"), "").expect("file");
        assert!(make_private(&place.path().join("file/x")).is_err());
    }

    #[test]
    fn a_folder_that_others_may_write_to_is_refused_and_a_sticky_one_only_at_the_end() {
        let place = tempfile::tempdir().expect("folder");
        let (open, inner) = (place.path().join("open"), place.path().join("open/inner"));
        make_private(&inner).expect("made");
        for mode in [0o777, 0o770, 0o722] {
            with_mode(&open, mode);
            assert!(matches!(check(&inner), Err(Error::Writable(path)) if path == open));
        }
        with_mode(&open, 0o1777);
        check(&inner).expect("others cannot move it");
        assert!(matches!(check(&open), Err(Error::Writable(_))));
        symlink(&inner, open.join("link")).expect("link");
        let link = check(&open.join("link"));
        assert!(matches!(link, Err(Error::Link(path)) if path == open.join("link")));
    }

    #[test]
    fn a_step_of_another_user_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root can give a folder away");
        }
        let place = tempfile::tempdir().expect("folder");
        let (theirs, inner) = (
            place.path().join("theirs"),
            place.path().join("theirs/inner"),
        );
        make_private(&inner).expect("made");
        chown(&theirs, Some(65534), None).expect("chown");
        assert!(
            matches!(check(&inner), Err(Error::Owner { path, owner: 65534 }) if path == theirs)
        );
        let link = place.path().join("link");
        symlink(place.path(), &link).expect("link");
        check(&link).expect("ours");
        lchown(&link, Some(65534), None).expect("chown");
        assert!(matches!(check(&link), Err(Error::Link(_))));
    }
}
