//! Files of a directory: with their types, in ranges, and never from outside of it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use percent_encoding::percent_decode_str;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;

use crate::http::{Answer, Content, Request, Status};

/// A directory whose files are served.
#[derive(Debug)]
pub struct Root(OwnedFd);

impl Root {
    /// Opens the directory.
    ///
    /// # Errors
    /// When it is no directory, or cannot be read.
    pub fn open(path: &Path) -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(CWD, path, flags, Mode::empty()).map(Self)
    }

    /// The file that the request names, or part of it.
    pub fn answer(&self, request: &Request<'_>) -> Answer {
        let Some(path) = relative_path(request.path) else {
            return Answer::status(Status(404));
        };
        match self.open_file(&path) {
            Ok(file) => answer_file(request, file, &path),
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::IO) => {
                Answer::status(Status(503))
            }
            Err(_) => Answer::status(Status(404)),
        }
    }

    /// Opens a file beneath the directory. The kernel itself refuses a path that leads out of it,
    /// be it by `..` or by a symbolic link; a check of the text beforehand could be raced.
    fn open_file(&self, path: &str) -> Result<File, Errno> {
        // NONBLOCK: opening a FIFO would wait for a writer. It changes nothing for files.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        loop {
            match openat2(&self.0, path, flags, Mode::empty(), resolve) {
                // EAGAIN: something was renamed meanwhile.
                Err(Errno::AGAIN | Errno::INTR) => {}
                opened => return opened.map(File::from),
            }
        }
    }
}

/// The path within the directory that the path of a request means.
fn relative_path(path: &str) -> Option<String> {
    let decoded = percent_decode_str(path.strip_prefix('/')?)
        .decode_utf8()
        .ok()?;
    if decoded.contains('\0') {
        return None;
    }
    let mut path = decoded.into_owned();
    if path.is_empty() || path.ends_with('/') {
        path.push_str("index.html");
    }
    Some(path)
}

fn answer_file(request: &Request<'_>, file: File, path: &str) -> Answer {
    let Ok(metadata) = file.metadata() else {
        return Answer::status(Status(503));
    };
    if !metadata.is_file() {
        return Answer::status(Status(404));
    }
    let modified = metadata.modified().ok().and_then(whole_seconds);
    let length = metadata.len();
    let mut answer = Answer {
        status: Status(200),
        content_type: content_type(path),
        headers: "Accept-Ranges: bytes\r\n".to_owned(),
        content: Content::File {
            file,
            offset: 0,
            length,
        },
    };
    if let Some(modified) = modified {
        answer = answer.with_header("Last-Modified", &httpdate::fmt_http_date(modified));
        let since = request
            .if_modified_since
            .and_then(|text| httpdate::parse_http_date(text).ok());
        if since.is_some_and(|since| since >= modified) {
            answer.status = Status(304);
            answer.content = Content::Static(b"");
            return answer;
        }
    }
    let unchanged = request.if_range.is_none_or(|text| {
        httpdate::parse_http_date(text).is_ok_and(|date| Some(date) == modified)
    });
    match request
        .range
        .filter(|_| unchanged)
        .map(|text| range(text, length))
    {
        Some(Range::Part(first, last)) => part(answer, first, last, length),
        Some(Range::Unsatisfiable) => {
            Answer::status(Status(416)).with_header("Content-Range", &format!("bytes */{length}"))
        }
        Some(Range::Whole) | None => answer,
    }
}

fn part(mut answer: Answer, first: u64, last: u64, whole: u64) -> Answer {
    answer.status = Status(206);
    if let Content::File { offset, length, .. } = &mut answer.content {
        *offset = first;
        *length = last - first + 1;
    }
    answer.with_header("Content-Range", &format!("bytes {first}-{last}/{whole}"))
}

/// Truncates a time to whole seconds, as HTTP dates have them, for comparisons. `None` for a time
/// that HTTP cannot express (before 1970, after 9999).
fn whole_seconds(time: SystemTime) -> Option<SystemTime> {
    let seconds = time.duration_since(UNIX_EPOCH).ok()?.as_secs();
    (seconds < 253_402_300_800).then(|| UNIX_EPOCH + Duration::from_secs(seconds))
}

fn content_type(path: &str) -> std::borrow::Cow<'static, str> {
    match mime_guess::from_path(path).first_raw() {
        Some(text) if text.starts_with("text/") => format!("{text}; charset=utf-8").into(),
        Some(other) => other.into(),
        None => "application/octet-stream".into(),
    }
}

/// The range that a `Range` header requests.
#[derive(Debug, PartialEq, Eq)]
enum Range {
    /// From the first to the last byte, both included.
    Part(u64, u64),
    /// The file has none of these bytes.
    Unsatisfiable,
    /// Something else: several ranges, other units, nonsense. The whole file is a correct answer
    /// then.
    Whole,
}

fn range(text: &str, length: u64) -> Range {
    let Some((first, last)) = text
        .strip_prefix("bytes=")
        .and_then(|set| set.split_once('-'))
    else {
        return Range::Whole;
    };
    let number = |text: &str| -> Option<u64> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        // A number too large to be one is past the end as well.
        digits.then(|| text.parse().unwrap_or(u64::MAX))
    };
    match (first.trim(), last.trim()) {
        ("", last) => match number(last) {
            Some(0) => Range::Unsatisfiable,
            Some(_) if length == 0 => Range::Unsatisfiable,
            Some(count) => Range::Part(length.saturating_sub(count), length - 1),
            None => Range::Whole,
        },
        (first, last) => {
            let last = if last.is_empty() {
                Some(u64::MAX)
            } else {
                number(last)
            };
            match (number(first), last) {
                (Some(first), Some(last)) if first > last => Range::Whole,
                (Some(first), Some(_)) if first >= length => Range::Unsatisfiable,
                (Some(first), Some(last)) => Range::Part(first, last.min(length - 1)),
                _ => Range::Whole,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{Parsed, parse};
    use proptest::prelude::*;

    #[test]
    fn ranges() {
        assert_eq!(range("bytes=0-0", 10), Range::Part(0, 0));
        assert_eq!(range("bytes=2-", 10), Range::Part(2, 9));
        assert_eq!(range("bytes=-3", 10), Range::Part(7, 9));
        assert_eq!(range("bytes=-30", 10), Range::Part(0, 9));
        assert_eq!(
            range("bytes=5-99999999999999999999999", 10),
            Range::Part(5, 9)
        );
        assert_eq!(range("bytes=10-", 10), Range::Unsatisfiable);
        assert_eq!(range("bytes=-0", 10), Range::Unsatisfiable);
        assert_eq!(range("bytes=0-", 0), Range::Unsatisfiable);
        assert_eq!(range("bytes=-1", 0), Range::Unsatisfiable);
        for whole in [
            "bytes=3-2",
            "bytes=",
            "bytes=-",
            "bytes=a-",
            "bytes=+1-2",
            "bytes=0-1,3-4",
            "lines=1-2",
        ] {
            assert_eq!(range(whole, 10), Range::Whole, "{whole}");
        }
    }

    struct Site {
        directory: tempfile::TempDir,
        root: Root,
    }

    /// A directory `in` with files, beside a file that must not be served.
    fn site() -> Result<Site, Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        let inner = directory.path().join("in");
        std::fs::create_dir_all(inner.join("sub"))?;
        std::fs::write(directory.path().join("secret"), "secret")?;
        std::fs::write(inner.join("a b.html"), "0123456789")?;
        std::fs::write(inner.join("empty"), "")?;
        std::fs::write(inner.join("sub/index.html"), "index")?;
        std::os::unix::fs::symlink("../secret", inner.join("out"))?;
        std::os::unix::fs::symlink("a b.html", inner.join("link.css"))?;
        std::os::unix::fs::symlink(directory.path().join("secret"), inner.join("absolute"))?;
        nix::unistd::mkfifo(&inner.join("fifo"), nix::sys::stat::Mode::S_IRWXU)?;
        let root = Root::open(&inner)?;
        Ok(Site { directory, root })
    }

    fn get(site: &Site, path: &str, headers: &str) -> (Answer, String) {
        let input = format!("GET {path} HTTP/1.0\r\n{headers}\r\n");
        let answer = match parse(input.as_bytes()) {
            Parsed::Complete(request, _) => site.root.answer(&request),
            other => panic!("{other:?}"),
        };
        let body = match &answer.content {
            Content::File {
                file,
                offset,
                length,
            } => {
                let mut bytes = vec![0; *length as usize];
                std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, *offset)
                    .expect("the part is there");
                String::from_utf8(bytes).expect("text")
            }
            _ => String::new(),
        };
        (answer, body)
    }

    #[test]
    fn files_and_parts_of_them() -> Result<(), Box<dyn std::error::Error>> {
        let site = site()?;
        let (answer, body) = get(&site, "/a%20b.html", "");
        assert_eq!((answer.status.0, &*body), (200, "0123456789"));
        assert_eq!(answer.content_type, "text/html; charset=utf-8");
        assert_eq!(get(&site, "/sub/", "").1, "index");
        assert_eq!(
            get(&site, "/empty", "").0.content_type,
            "application/octet-stream"
        );
        assert_eq!(
            get(&site, "/link.css", "").0.content_type,
            "text/css; charset=utf-8"
        );

        let (answer, body) = get(&site, "/a%20b.html", "Range: bytes=2-4\r\n");
        assert_eq!((answer.status.0, &*body), (206, "234"));
        assert!(answer.headers.contains("Content-Range: bytes 2-4/10\r\n"));
        let (answer, _) = get(&site, "/a%20b.html", "Range: bytes=10-\r\n");
        assert_eq!(answer.status.0, 416);
        assert!(answer.headers.contains("Content-Range: bytes */10\r\n"));
        Ok(())
    }

    #[test]
    fn conditions() -> Result<(), Box<dyn std::error::Error>> {
        let site = site()?;
        let (answer, _) = get(&site, "/a%20b.html", "");
        let modified = answer
            .headers
            .lines()
            .find_map(|line| line.strip_prefix("Last-Modified: "))
            .ok_or("no date")?
            .to_owned();
        let (answer, _) = get(
            &site,
            "/a%20b.html",
            &format!("If-Modified-Since: {modified}\r\n"),
        );
        assert_eq!(answer.status.0, 304);
        let range = "Range: bytes=0-0\r\n";
        let (answer, _) = get(
            &site,
            "/a%20b.html",
            &format!("{range}If-Range: {modified}\r\n"),
        );
        assert_eq!(answer.status.0, 206);
        let old = "If-Range: Thu, 01 Jan 1970 00:00:00 GMT\r\n";
        assert_eq!(
            get(&site, "/a%20b.html", &format!("{range}{old}"))
                .0
                .status
                .0,
            200
        );
        Ok(())
    }

    #[test]
    fn nothing_from_outside_and_nothing_that_is_no_file() -> Result<(), Box<dyn std::error::Error>>
    {
        let site = site()?;
        assert!(site.directory.path().join("secret").exists());
        for path in [
            "/../secret",
            "/%2e%2e/secret",
            "/sub/../../secret",
            "//etc/passwd",
            "/%2Fetc/passwd",
            "/out",
            "/absolute",
            "/sub",
            "/fifo",
            "/nothing",
            "/a%00",
            "/%ff",
        ] {
            assert_eq!(get(&site, path, "").0.status.0, 404, "{path}");
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn a_part_is_within(text in "bytes=[0-9]{0,3}-[0-9]{0,3}", length in 0_u64..300) {
            if let Range::Part(first, last) = range(&text, length) {
                prop_assert!(first <= last && last < length);
            }
        }
    }
}
