//! The application: the answers to requests, whatever architecture serves them.

use std::sync::Arc;
use std::time::Duration;

use crate::system::shared_counter::SharedCounter;

use crate::files::Root;
use crate::guestbook;
use crate::http::{Answer, Method, Request, Status, parameter};
use crate::store::{Call, Failed, Place, Reply};
use crate::work::{self, Kind, WORK_US_MAX};

/// The application as one worker runs it.
#[derive(Clone, Debug)]
pub struct App {
    /// The name of the worker that answers: the value of `X-Worker`.
    pub worker: String,
    /// The process that answers: the value of `X-Pid`.
    pub pid: u32,
    /// The name of the architecture.
    pub model: &'static str,
    /// Whether connections may stay open after an answer.
    pub keep_alive: bool,
    /// How long a client may take for a request, and may stay idle between two.
    pub header_timeout: Duration,
    /// Where the guest book is kept.
    pub place: Place,
    /// The files that are served beside it.
    pub files: Option<Arc<Root>>,
    /// Counts every answer when it is made, before its first byte is sent. So a client that has received an answer
    /// finds it counted.
    pub counter: Option<Arc<SharedCounter>>,
}

/// The outcome of a request.
#[derive(Debug)]
pub enum Outcome {
    /// An answer.
    Answer(Answer),
    /// A question to the store; its reply makes the answer.
    Ask(Call),
}

impl App {
    /// Handles `request`. `/work` does its work in here.
    pub fn handle(&self, request: &Request<'_>) -> Outcome {
        let ask = match (request.path, request.method) {
            ("/", Method::Get) => Ok(Call::Page { visit: true }),
            ("/", Method::Head) => Ok(Call::Page { visit: false }),
            ("/", Method::Post) => guestbook::sign(request),
            ("/", Method::Other) => Err(not_allowed("GET, HEAD, POST")),
            (_, Method::Post | Method::Other) => Err(not_allowed("GET, HEAD")),
            ("/work", _) => Err(work_for(request.query)),
            ("/whoami", _) => Err(self.whoami()),
            _ => Err(match &self.files {
                Some(files) => files.answer(request),
                None => Answer::status(Status(404)),
            }),
        };
        ask.map_or_else(Outcome::Answer, Outcome::Ask)
    }

    /// Returns the answer to a request from the store's reply.
    pub fn answer(&self, reply: Result<Reply, Failed>) -> Answer {
        guestbook::answer(reply, self.model, &self.worker)
    }

    fn whoami(&self) -> Answer {
        let mut answer = Answer::text(
            Status(200),
            format!(
                "{{\"worker\":{:?},\"pid\":{},\"model\":\"{}\"}}\n",
                self.worker, self.pid, self.model
            ),
        );
        answer.content_type = "application/json".into();
        answer
    }
}

fn not_allowed(allowed: &str) -> Answer {
    Answer::status(Status(405)).with_header("Allow", allowed)
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
pub(crate) mod tests {
    use super::*;
    use crate::http::{Parsed, parse};
    use proptest::prelude::*;

    /// An application for tests, without files, and with a store in a place that does not exist.
    pub fn app() -> App {
        App {
            worker: "3".to_owned(),
            pid: 7,
            model: "preforked",
            keep_alive: true,
            header_timeout: Duration::from_secs(10),
            place: Place::Directory("/dev/null/nothing".into()),
            files: None,
            counter: None,
        }
    }

    fn outcome(head: &str) -> Outcome {
        let input = format!("{head} HTTP/1.0\r\n\r\n");
        match parse(input.as_bytes()) {
            Parsed::Complete(request, _) => app().handle(&request),
            other => panic!("{other:?}"),
        }
    }

    fn status(head: &str) -> u16 {
        match outcome(head) {
            Outcome::Answer(answer) => answer.status.0,
            Outcome::Ask(call) => panic!("{call:?}"),
        }
    }

    #[test]
    fn routes() {
        let asks = |head, visit| matches!(outcome(head), Outcome::Ask(Call::Page { visit: v }) if v == visit);
        assert!(asks("GET /", true));
        assert!(asks("GET /?x=1", true));
        assert!(asks("HEAD /", false));
        assert_eq!(status("DELETE /"), 405);
        assert_eq!(status("POST /"), 415);
        assert_eq!(status("POST /whoami"), 405);
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
            match outcome(&format!("GET {target}")) {
                Outcome::Answer(answer) => prop_assert!((200..500).contains(&answer.status.0)),
                Outcome::Ask(call) => prop_assert_eq!(call, Call::Page { visit: true }),
            }
        }
    }
}
