//! The log of commands that keep running: one line for each event, for people or for programs.

use std::io::IsTerminal;
use std::os::unix::fs::MetadataExt;
use tracing::Level;
use tracing_subscriber::fmt::FormatEvent;
use tracing_subscriber::fmt::format::{self, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

use wakeone::attach::Event;
use wakeone_model::layout;
use wakeone_terminal::{error_style, wrapped};

/// How a command writes its log.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct LogArgs {
    /// Form of the lines on standard error
    #[arg(long, value_enum, default_value_t = Form::Text)]
    log: Form,

    /// Least important lines to write: error, warn, info or debug
    #[arg(long, value_name = "LEVEL", default_value_t = Level::INFO, value_parser = level)]
    log_level: Level,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Form {
    /// Short sentences
    Text,
    /// An object a line
    Json,
}

impl LogArgs {
    /// Writes the log from now on. Text has no time and no colour: the journal, and `ts`, add the time themselves. If
    /// standard error is the journal's, each line has its priority. A terminal gets lines wrapped between words.
    pub fn start(self) {
        let builder = tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .with_max_level(self.log_level)
            .log_internal_errors(false);
        match self.log {
            Form::Json => builder.json().flatten_event(true).with_target(false).init(),
            Form::Text => {
                let sentence = format::debug_fn(|writer, field, value| {
                    if field.name() == "message" {
                        write!(writer, "{value:?}")
                    } else {
                        Ok(())
                    }
                });
                builder
                    .with_ansi(false)
                    .fmt_fields(sentence)
                    .event_format(Sentence {
                        journal: is_journal(),
                    })
                    .init();
            }
        }
    }
}

/// Formats an event as a line with its sentence.
struct Sentence {
    journal: bool,
}

impl<S, N> FormatEvent<S, N> for Sentence
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &tracing_subscriber::fmt::FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> std::fmt::Result {
        if self.journal {
            write!(writer, "<{}>", priority(*event.metadata().level()))?;
        }
        let style = error_style();
        if style.width.is_none() {
            context
                .field_format()
                .format_fields(writer.by_ref(), event)?;
            return writeln!(writer);
        }
        let mut line = String::new();
        context
            .field_format()
            .format_fields(Writer::new(&mut line), event)?;
        writer.write_str(&wrapped(&line, "", style))
    }
}

/// The priority of syslog(3), which sd-daemon(3) expects at the beginning of a line.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Whether standard error is the journal's: systemd names its device and inode.
fn is_journal() -> bool {
    let stderr = std::io::stderr();
    if stderr.is_terminal() {
        return false;
    }
    let named = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let about = std::fs::metadata("/proc/self/fd/2");
    about.is_ok_and(|about| named == format!("{}:{}", about.dev(), about.ino()))
}

/// Parses a level. `trace` is not accepted, because nothing is written at it.
fn level(text: &str) -> Result<Level, String> {
    text.parse()
        .ok()
        .filter(|level| *level <= Level::DEBUG && !text.starts_with(|c: char| c.is_ascii_digit()))
        .ok_or_else(|| format!("`{text}` is no level; there are error, warn, info and debug"))
}

/// Logs an event of attached servers.
pub fn event(event: &Event) {
    match event {
        Event::Attached(name, counted) => {
            tracing::info!(
                event = "attached",
                "{name} is steered; {} counted in",
                layout::counted(*counted, "open connections")
            );
        }
        Event::Gone(name) => {
            tracing::info!(event = "gone", "{name}: its server closed all sockets")
        }
        Event::Refused(why) => tracing::warn!(event = "refused", "{why}"),
        Event::Steered(name, event) => event.log(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_go_down_to_debug() {
        assert_eq!(level("debug"), Ok(Level::DEBUG));
        assert_eq!(level("error"), Ok(Level::ERROR));
        for text in ["", "trace", "3", "loud"] {
            assert!(level(text).is_err(), "{text}");
        }
    }
}
