//! The application: what is answered to a request, whatever architecture serves it.

use std::time::Duration;

use crate::http::{Answer, Method, Request, Status, parameter};
use crate::work::{self, Kind, WORK_US_MAX};

/// The application as one worker runs it.
#[derive(Clone, Debug)]
pub struct App {
    /// Which worker answers: the value of `X-Worker`.
    pub worker: String,
    /// The process that answers: the value of `X-Pid`.
    pub pid: u32,
    /// The name of the architecture.
    pub model: &'static str,
    /// Whether connections may stay open after an answer.
    pub keep_alive: bool,
    /// How long a client may take for a request, and may stay idle between two.
    pub header_timeout: Duration,
}

impl App {
    /// The answer to `request`. `/work` does its work in here.
    pub fn answer(&self, request: &Request<'_>) -> Answer {
        match request.path {
            "/" => only_get(request, || self.front()),
            "/work" => only_get(request, || work_for(request.query)),
            "/whoami" => only_get(request, || self.whoami()),
            _ => Answer::status(Status(404)),
        }
    }

    fn front(&self) -> Answer {
        Answer::text(
            Status(200),
            format!(
                "wakeone serve, {} model\n\n\
                 /work?us=N&kind=cpu|sleep  N microseconds of work\n\
                 /whoami                    who answers\n",
                self.model
            ),
        )
    }

    fn whoami(&self) -> Answer {
        let mut answer = Answer::text(
            Status(200),
            format!(
                "{{\"worker\":{:?},\"pid\":{},\"model\":\"{}\"}}\n",
                self.worker, self.pid, self.model
            ),
        );
        answer.content_type = "application/json";
        answer
    }
}

/// For paths that can only be read.
fn only_get(request: &Request<'_>, answer: impl FnOnce() -> Answer) -> Answer {
    match request.method {
        Method::Get | Method::Head => answer(),
        _ => Answer::status(Status(405)).with_header("Allow", "GET, HEAD"),
    }
}

fn work_for(query: &str) -> Answer {
    let us = parameter(query, "us").unwrap_or("0").parse::<u64>();
    let kind = match parameter(query, "kind").unwrap_or("cpu") {
        "cpu" => Some(Kind::Cpu),
        "sleep" => Some(Kind::Sleep),
        _ => None,
    };
    match (us, kind) {
        (Ok(us), Some(kind)) if us <= WORK_US_MAX => {
            work::work(kind, Duration::from_micros(us));
            Answer::text(Status(200), "done\n")
        }
        _ => Answer::text(
            Status(400),
            format!("/work takes us=0..{WORK_US_MAX} and kind=cpu or kind=sleep\n"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{Parsed, parse};
    use proptest::prelude::*;

    fn app() -> App {
        App {
            worker: "3".to_owned(),
            pid: 7,
            model: "preforked",
            keep_alive: true,
            header_timeout: Duration::from_secs(10),
        }
    }

    fn status(head: &str) -> u16 {
        let input = format!("{head} HTTP/1.0\r\n\r\n");
        match parse(input.as_bytes()) {
            Parsed::Complete(request, _) => app().answer(&request).status.0,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn routes() {
        assert_eq!(status("GET /"), 200);
        assert_eq!(status("HEAD /"), 200);
        assert_eq!(status("DELETE /"), 405);
        assert_eq!(status("GET /whoami"), 200);
        assert_eq!(status("GET /nothing"), 404);
        assert_eq!(status("GET /work"), 200);
        assert_eq!(status("GET /work?us=10&kind=sleep"), 200);
        assert_eq!(status("GET /work?us=10&kind=nap"), 400);
        assert_eq!(status("GET /work?us=-1"), 400);
        assert_eq!(status("GET /work?us=10000001"), 400);
        assert_eq!(status("GET /work?us=99999999999999999999999"), 400);
    }

    proptest! {
        #[test]
        fn any_target_gets_an_answer(target in "/[!-~]{0,60}") {
            prop_assume!(!target.starts_with("/work"));
            let status = status(&format!("GET {target}"));
            prop_assert!((200..500).contains(&status), "{}", status);
        }
    }
}
