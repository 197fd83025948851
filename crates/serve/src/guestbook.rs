//! The guest book: a page with the entries and the number of visits, and a form that adds one.
//! The application of "Linux Applications Performance", so that its table can be measured again.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::http::{Answer, Content, Request, Status};
use crate::store::{Call, Entry, Failed, NAME_CHARS_MAX, Reply, TEXT_CHARS_MAX};

const HEAD: &str = "<!DOCTYPE html>
<html lang=\"en\">
<meta charset=\"utf-8\">
<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">
<title>Guest book</title>
<style>
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif }
body { max-width: 40rem; margin: 2rem auto; padding: 0 1rem }
form { display: grid; gap: .5rem; margin: 1.5rem 0 }
input, textarea, button { font: inherit; padding: .4rem }
article { border-top: 1px solid #8888; padding: .8rem 0; overflow-wrap: anywhere }
p { margin: .2rem 0; white-space: pre-wrap }
small { opacity: .7 }
</style>
<h1>Guest book</h1>
";

/// Makes the page from the store's reply.
pub fn page(visits: u64, total: u64, entries: &[Entry], model: &str, worker: &str) -> Answer {
    let mut html = String::with_capacity(4096);
    html.push_str(HEAD);
    let visitor = if visits == 1 { "visit" } else { "visits" };
    let made = if total == 1 { "entry" } else { "entries" };
    let _ = write!(
        html,
        "<div>{visits} {visitor}, {total} {made}. <small>{model}, worker {worker}</small></div>\n\
         <form method=\"post\" action=\"/\">\n\
         <input name=\"name\" placeholder=\"Your name\" aria-label=\"Your name\" maxlength=\"{NAME_CHARS_MAX}\">\n\
         <textarea name=\"text\" rows=\"3\" placeholder=\"Your message\" aria-label=\"Your message\" \
         maxlength=\"{TEXT_CHARS_MAX}\" required></textarea>\n\
         <button>Sign</button>\n\
         </form>\n"
    );
    for entry in entries {
        html.push_str("<article><b>");
        escape(&mut html, &entry.name);
        html.push_str("</b> <small>");
        escape(&mut html, &date(entry.at_unix_s));
        html.push_str("</small><p>");
        escape(&mut html, &entry.text);
        html.push_str("</p></article>\n");
    }
    let mut answer = Answer::text(Status(200), html);
    answer.content_type = "text/html; charset=utf-8".into();
    answer
}

/// Returns the call for an entry that a form sends, or the refusal.
///
/// # Errors
/// The refusal: 415 for something else than a form, 400 without text, 413 when it is too long.
pub fn sign(request: &Request<'_>) -> Result<Call, Answer> {
    let form = request.content_type.is_some_and(|kind| {
        let kind = kind.split(';').next().unwrap_or("").trim();
        kind.eq_ignore_ascii_case("application/x-www-form-urlencoded")
    });
    if !form {
        return Err(refuse(
            415,
            "send a form: application/x-www-form-urlencoded",
        ));
    }
    let (mut name, mut text) = (String::new(), String::new());
    for (key, value) in form_urlencoded::parse(&request.body) {
        match &*key {
            "name" => name = value.trim().to_owned(),
            "text" => text = value.trim().replace("\r\n", "\n"),
            _ => {}
        }
    }
    if text.is_empty() {
        return Err(refuse(400, "an entry needs a text"));
    }
    if name.chars().count() > NAME_CHARS_MAX || text.chars().count() > TEXT_CHARS_MAX {
        let limits = format!(
            "a name has at most {NAME_CHARS_MAX} characters and a text at most {TEXT_CHARS_MAX}"
        );
        return Err(refuse(413, &limits));
    }
    if name.is_empty() {
        name.push_str("Anonymous");
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Ok(Call::Add(Entry {
        at_unix_s: now.unwrap_or(Duration::ZERO).as_secs(),
        name,
        text,
    }))
}

/// The answer once the store has replied.
pub fn answer(reply: Result<Reply, Failed>, model: &str, worker: &str) -> Answer {
    match reply {
        Ok(Reply::Page {
            visits,
            total,
            entries,
        }) => page(visits, total, &entries, model, worker),
        // The browser shows the page then, and a reload does not sign again.
        Ok(Reply::Added) => Answer {
            content: Content::Static(b"thank you\n"),
            ..Answer::status(Status(303)).with_header("Location", "/")
        },
        Err(failed) => refuse(503, &failed.0),
    }
}

fn refuse(status: u16, why: &str) -> Answer {
    Answer::text(Status(status), format!("{why}\n"))
}

fn date(at_unix_s: u64) -> String {
    // A time that cannot be a date (the crate panics beyond the year 9999) is shown as the number.
    if at_unix_s < 253_402_300_800 {
        httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(at_unix_s))
    } else {
        at_unix_s.to_string()
    }
}

/// Appends `text` so that HTML shows it and does not obey it.
fn escape(html: &mut String, text: &str) {
    for character in text.chars() {
        match character {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            '\'' => html.push_str("&#39;"),
            other => html.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{Parsed, parse};
    use proptest::prelude::*;

    fn signed(content_type: &str, body: &str) -> Result<Call, u16> {
        let input = format!(
            "POST / HTTP/1.0\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        match parse(input.as_bytes()) {
            Parsed::Complete(request, _) => sign(&request).map_err(|answer| answer.status.0),
            other => panic!("{other:?}"),
        }
    }

    const FORM: &str = "application/x-www-form-urlencoded; charset=utf-8";

    #[test]
    fn what_a_form_may_send() {
        match signed(FORM, "name=A+B&text=caf%C3%A9%0D%0A2&more=1") {
            Ok(Call::Add(entry)) => {
                assert_eq!((&*entry.name, &*entry.text), ("A B", "café\n2"));
                assert!(entry.at_unix_s > 1_700_000_000);
            }
            other => panic!("{other:?}"),
        }
        match signed(FORM, "text=x") {
            Ok(Call::Add(entry)) => assert_eq!(entry.name, "Anonymous"),
            other => panic!("{other:?}"),
        }
        assert_eq!(signed("text/plain", "text=x"), Err(415));
        assert_eq!(signed(FORM, "name=x"), Err(400));
        assert_eq!(signed(FORM, "text=+++"), Err(400));
        let long = |length| format!("text={}", "é".repeat(length));
        assert!(signed(FORM, &long(TEXT_CHARS_MAX)).is_ok());
        assert_eq!(signed(FORM, &long(TEXT_CHARS_MAX + 1)), Err(413));
        let name = "n".repeat(NAME_CHARS_MAX + 1);
        assert_eq!(signed(FORM, &format!("text=x&name={name}")), Err(413));
    }

    #[test]
    fn a_time_beyond_all_calendars_is_shown() {
        assert_eq!(date(u64::MAX), u64::MAX.to_string());
        assert_eq!(date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
    }

    proptest! {
        #[test]
        fn no_entry_becomes_markup(name in ".{0,20}", text in ".{0,60}", at in any::<u64>()) {
            let entry = Entry { at_unix_s: at, name, text };
            let answer = page(1, 1, &[entry], "epoll", "0");
            let Content::Bytes(bytes) = answer.content else { panic!() };
            let html = String::from_utf8(bytes).expect("UTF-8");
            let article = &html[html.find("<article>").expect("an entry")..];
            let tags = ["article", "b", "/b", "small", "/small", "p", "/p", "/article"];
            let found: Vec<&str> = article
                .match_indices('<')
                .map(|(at, _)| article[at + 1..].split('>').next().unwrap_or(""))
                .collect();
            prop_assert_eq!(found, tags);
        }
    }
}
