//! The UNIX socket beside a group's state: one connection, one request at most, one JSON document.
//!
//! `{"ask":"snapshot"}` returns the group's metrics, and so does an empty request, or none.
//! `{"ask":"rescue","group":…,"slot":…}` moves a slot's queue to the others now.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use wakeone_control::paths::Paths;
use wakeone_control::state::SOCKET;
use wakeone_kernel::netns;

/// The longest request.
pub const MOST_BYTES: usize = 4 << 10;
/// The longest answer: 256 slots with all their metrics take some 200 kB.
const MOST_ANSWER: u64 = 16 << 20;
/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The possible requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Asks for the group's metrics.
    Snapshot,
    /// Asks to move the queue of a slot.
    Rescue {
        /// The group.
        group: String,
        /// Its slot.
        slot: usize,
    },
}

/// The answer to [`Request::Rescue`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// This number of connections was moved.
    Moved(u32),
    /// Nothing was moved, for this reason.
    Refused(String),
}

/// Returns the request in the bytes so far; `None`: wait for more. `over`: no more bytes come.
pub fn parse(bytes: &[u8], over: bool) -> Option<Result<Request, String>> {
    let line = bytes
        .split(|byte| *byte == b'\n')
        .next()
        .unwrap_or_default();
    let whole = line.len() < bytes.len();
    if !whole && !over {
        let long = bytes.len() >= MOST_BYTES;
        return long.then(|| Err("the request is too long".to_owned()));
    }
    if line.trim_ascii().is_empty() {
        return Some(Ok(Request::Snapshot));
    }
    Some(serde_json::from_slice(line).map_err(|error| {
        format!(r#"this is no request ({error}); write {{"ask":"snapshot"}} or {{"ask":"rescue","group":NAME,"slot":N}}"#)
    }))
}

fn path_of(paths: &Paths, group: &str) -> PathBuf {
    paths.runtime.join(group).join(SOCKET)
}

/// Returns a short name for a path that may be longer than a socket's address can hold. It goes through the descriptor
/// of the path's folder.
fn short(path: &Path) -> io::Result<(File, PathBuf)> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = File::from(rustix::fs::open(folder, flags, Mode::empty())?);
    let short = PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", folder.as_raw_fd()));
    Ok((folder, short))
}

/// The socket of a group; its file is removed with it.
#[derive(Debug)]
pub struct Socket {
    /// The listener, which does not block.
    pub listener: UnixListener,
    path: PathBuf,
    inode: u64,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // A successor may have made its own socket already.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|about| about.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Binds the socket of a group whose folder is ours (and locked). Replaces the socket of an agent that was killed.
///
/// # Errors
/// The socket cannot be made.
pub fn bind(paths: &Paths, group: &str) -> io::Result<Socket> {
    let path = path_of(paths, group);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let (_folder, short) = short(&path)?;
    // A container's `ss` does not show it then.
    let listener = netns::at_home(|| UnixListener::bind(short))??;
    // Nobody else could connect meanwhile: the folder is private.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    let inode = std::fs::symlink_metadata(&path)?.ino();
    Ok(Socket {
        listener,
        path,
        inode,
    })
}

/// Sends a request to the agent of a group. Returns its answer as JSON.
///
/// # Errors
/// There is no agent, or it does not answer.
pub fn ask(paths: &Paths, group: &str, request: &Request) -> io::Result<Vec<u8>> {
    let (_folder, short) = short(&path_of(paths, group))?;
    let mut stream = UnixStream::connect(short)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = Vec::new();
    stream.take(MOST_ANSWER).read_to_end(&mut answer)?;
    Ok(answer)
}

/// Asks the agent of a group to move a slot's queue. Returns how many connections were moved.
///
/// # Errors
/// One sentence.
pub fn rescue(paths: &Paths, group: &str, slot: usize) -> Result<u32, String> {
    let request = Request::Rescue {
        group: group.to_owned(),
        slot,
    };
    let answer = ask(paths, group, &request).map_err(|error| {
        format!(
            "cannot move the queue of slot {slot} of `{group}`: its agent does not answer ({error})"
        )
    })?;
    match serde_json::from_slice(&answer) {
        Ok(Answer::Moved(moved)) => Ok(moved),
        Ok(Answer::Refused(why)) => Err(why),
        Err(error) => Err(format!(
            "cannot move the queue of slot {slot} of `{group}`: its agent gave no answer that can be read ({error})"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_is_a_line_or_nothing() {
        let rescue = Request::Rescue {
            group: "web".into(),
            slot: 3,
        };
        for (text, over, then) in [
            ("", false, None),
            ("", true, Some(Request::Snapshot)),
            ("\n", false, Some(Request::Snapshot)),
            (r#"{"ask":"snapshot"}"#, false, None),
            (r#"{"ask":"snapshot"}"#, true, Some(Request::Snapshot)),
            (
                r#"{"ask":"rescue","group":"web","slot":3}"#,
                true,
                Some(rescue.clone()),
            ),
            (
                "{\"ask\":\"rescue\",\"group\":\"web\",\"slot\":3}\nmore",
                false,
                Some(rescue),
            ),
        ] {
            let parsed = parse(text.as_bytes(), over);
            assert_eq!(parsed, then.map(Ok), "{text}");
        }
        for bad in [
            "rubbish",
            "{}",
            r#"{"ask":"quit"}"#,
            r#"{"ask":"rescue","group":"web","slot":-1}"#,
            "\u{0}",
        ] {
            assert!(matches!(parse(bad.as_bytes(), true), Some(Err(_))), "{bad}");
        }
        assert!(matches!(parse(&[b'a'; MOST_BYTES], false), Some(Err(_))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..MOST_BYTES * 2)) {
            prop_assert!(parse(&bytes, true).is_some());
            if bytes.len() >= MOST_BYTES {
                prop_assert!(parse(&bytes, false).is_some());
            }
        }
    }

    #[test]
    fn a_socket_left_behind_is_replaced_however_long_its_path() {
        let root = tempfile::tempdir().expect("folder");
        let runtime = root.path().join("a".repeat(120));
        std::fs::create_dir_all(runtime.join("web")).expect("folder");
        let paths = Paths::of(&runtime);
        // As by kill -9: the file stays.
        std::mem::forget(bind(&paths, "web").expect("bound"));
        let bound = bind(&paths, "web").expect("bound again");
        let listener = &bound.listener;
        let mode = std::fs::metadata(path_of(&paths, "web"))
            .expect("socket")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        let asked = std::thread::scope(|scope| {
            let asker = scope.spawn(|| rescue(&paths, "web", 1));
            listener.set_nonblocking(false).expect("blocking");
            let (mut stream, _) = listener.accept().expect("asked");
            let mut text = String::new();
            stream.read_to_string(&mut text).expect("request");
            assert_eq!(text.trim(), r#"{"ask":"rescue","group":"web","slot":1}"#);
            stream.write_all(br#"{"moved":7}"#).expect("answered");
            drop(stream);
            asker.join().expect("thread")
        });
        assert_eq!(asked, Ok(7));
        drop(bound);
        assert!(!path_of(&paths, "web").exists());
        let gone = rescue(&paths, "web", 1).expect_err("nobody");
        assert!(gone.contains("its agent does not answer"), "{gone}");
    }
}
