//! The rows and columns of both the picture and the plain text.

use wakeone_model::listener::Protocol;
use wakeone_model::snapshot::{Queue, Row};
use wakeone_model::verdict::time;

use crate::frame::{Frame, Steering};
use wakeone_model::layout::printable;

/// A column of the table of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// Process id.
    Pid,
    /// Process name.
    Name,
    /// Its slots in a steered group.
    Slot,
    /// Its share, as a bar and a number.
    Share,
    /// Connections open.
    Active,
    /// Waiting connections and the limit, of the queues that it alone serves.
    Queue,
    /// 99th percentile of the wait in the queue.
    Wait,
    /// Threads woken a connection of the listener.
    Wakes,
    /// CPU.
    Cpu,
    /// Its part of the policy's choices.
    Chosen,
    /// Times its queue was moved.
    Rescues,
    /// Its state.
    State,
}

/// How a column is shown.
pub struct Form {
    /// Which.
    pub column: Column,
    /// Its heading.
    pub title: &'static str,
    /// Its width; that of the share grows.
    pub width: u16,
    /// Where there is not room for all, the highest is left out first.
    pub rank: u8,
    /// Of steered groups only.
    steered: bool,
    /// Words are set to the left, numbers to the right.
    pub words: bool,
}

const fn form(column: Column, title: &'static str, width: u16, rank: u8) -> Form {
    Form {
        column,
        title,
        width,
        rank,
        steered: matches!(column, Column::Slot | Column::Chosen | Column::Rescues),
        words: matches!(column, Column::Name | Column::Share | Column::State),
    }
}

impl Form {
    /// Whether only steered groups have it.
    pub fn steered(&self) -> bool {
        self.steered
    }
}

/// All columns from left to right.
pub const FORMS: [Form; 12] = [
    form(Column::Pid, "pid", 7, 0),
    form(Column::Name, "name", 15, 10),
    form(Column::Slot, "slot", 4, 5),
    form(Column::Share, "share", 8, 1),
    form(Column::Active, "open", 6, 4),
    form(Column::Queue, "queue", 9, 3),
    form(Column::Wait, "wait p99", 8, 6),
    form(Column::Wakes, "wakeups", 7, 8),
    form(Column::Cpu, "cpu", 5, 7),
    form(Column::Chosen, "chosen", 6, 11),
    form(Column::Rescues, "moves", 5, 9),
    form(Column::State, "state", 8, 2),
];

/// A share wider than this shows nothing more.
const WIDEST_SHARE: u16 = 45;

/// Returns the columns that have room in `width`, with the width of each; the share gets the spare width.
pub fn fitting(width: u16, steered: bool) -> Vec<(&'static Form, u16)> {
    let mut forms: Vec<&Form> = FORMS.iter().filter(|f| steered || !f.steered).collect();
    let taken = |forms: &[&Form]| forms.iter().map(|f| f.width + 1).sum::<u16>() - 1;
    while forms.len() > 2 && taken(&forms) > width {
        let last = forms.iter().map(|f| f.rank).max();
        forms.retain(|f| Some(f.rank) != last);
    }
    let spare = width.saturating_sub(taken(&forms));
    let wide = |form: &'static Form| match form.column {
        Column::Share => (form, (form.width + spare).min(WIDEST_SHARE)),
        _ => (form, form.width),
    };
    forms.into_iter().map(wide).collect()
}

/// The quantity that the shares divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShareOf {
    /// Connections taken.
    Connections,
    /// Choices of the policy: it takes no tracing to know them.
    Choices,
    /// CPU: without tracing and steering nothing else is known.
    Cpu,
}

impl ShareOf {
    /// For the column's heading.
    pub fn title(self) -> &'static str {
        match self {
            ShareOf::Connections => "share",
            ShareOf::Choices => "chosen",
            ShareOf::Cpu => "cpu share",
        }
    }
}

/// One worker, ready to be shown.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// The watched numbers of the worker.
    pub row: Row,
    /// Its share, 0 to 1; `None` where there is nothing to share.
    pub share: Option<f64>,
    /// That as a part of the largest.
    pub bar: f64,
    /// The queues that it alone serves.
    pub queue: Option<Queued>,
    /// Whether it serves a queue together with others.
    pub shared: bool,
    /// Its slots.
    pub slots: Vec<u32>,
    /// Connections that it holds, where there are connections.
    pub open: Option<u64>,
    /// Its part of the policy's choices since the refresh before, 0 to 1.
    pub chosen: Option<f64>,
    /// Times its queues were moved.
    pub rescues: u64,
    /// The worker's state, or its slot's where that is worse.
    pub state: String,
}

/// The length of a queue, and its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Queued {
    /// Connections; bytes of a UDP socket.
    pub length: u64,
    /// The backlog.
    pub limit: u64,
    /// Datagrams are counted in bytes and have no backlog.
    pub bytes: bool,
}

impl std::fmt::Display for Queued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.bytes {
            write!(f, "{} B", self.length)
        } else {
            write!(f, "{}/{}", self.length, self.limit)
        }
    }
}

fn sum(queues: &[&Queue], bytes: bool) -> Option<Queued> {
    (!queues.is_empty()).then(|| Queued {
        length: queues.iter().map(|q| u64::from(q.length)).sum(),
        limit: queues.iter().map(|q| u64::from(q.limit)).sum(),
        bytes,
    })
}

/// A frame as rows, by process id.
pub struct Table {
    /// The workers.
    pub lines: Vec<Line>,
    /// The quantity that their shares divide.
    pub share_of: ShareOf,
    /// The queues that do not belong to one worker: a sentence each.
    pub shared: Vec<String>,
}

/// Times that each slot was chosen since the refresh before; all times where that is not known.
fn choices(now: &Steering, before: Option<&Steering>) -> Vec<u64> {
    let earlier = |slot: u32| {
        let slots = before.map_or(&[][..], |b| &b.slots);
        slots
            .iter()
            .find(|s| s.slot == slot)
            .map_or(0, |s| s.selected)
    };
    let since = |slot: &crate::SlotLook| slot.selected.saturating_sub(earlier(slot.slot));
    now.slots.iter().map(since).collect()
}

fn part(mine: f64, all: f64) -> Option<f64> {
    (all > 0.0).then(|| mine / all)
}

/// Whether the probes count each worker's connections.
fn takes_known(frame: &Frame) -> bool {
    let trace = frame.watch.last.trace.as_ref();
    frame.watch.view.tracing && trace.is_none_or(|trace| !trace.gaps.accepts)
}

/// Makes the rows of a frame; `before`: how it was steered at the refresh before.
pub fn table(frame: &Frame, before: Option<&Steering>) -> Table {
    let bytes = frame.watch.last.listener.protocol == Protocol::Udp;
    let (rows, queues) = (frame.watch.rows(), frame.watch.queues());
    let steering = frame.steering.as_ref();
    let chosen = steering.map(|now| choices(now, before)).unwrap_or_default();
    let chosen_in_all: f64 = chosen.iter().map(|n| *n as f64).sum();
    let share_of = match steering {
        _ if takes_known(frame) => ShareOf::Connections,
        Some(_) => ShareOf::Choices,
        None => ShareOf::Cpu,
    };
    let cpu: f64 = rows.iter().map(|r| r.cpu).sum();
    let mut lines: Vec<Line> = rows
        .into_iter()
        .map(|row| {
            let pid = row.pid;
            let own: Vec<&Queue> = queues.iter().filter(|q| q.pids == [pid]).collect();
            let slots = || steering.into_iter().flat_map(|s| s.slots_of(pid));
            let mine: f64 = steering
                .into_iter()
                .flat_map(|s| s.slots.iter().zip(&chosen))
                .filter(|(slot, _)| slot.pid == Some(pid))
                .map(|(_, n)| *n as f64)
                .sum();
            let chosen = part(mine, chosen_in_all);
            let worst = slots().map(|s| &s.state).find(|state| *state != "up");
            Line {
                share: match share_of {
                    ShareOf::Connections => row.share,
                    ShareOf::Choices => chosen,
                    ShareOf::Cpu => part(row.cpu, cpu),
                },
                bar: 0.0,
                queue: sum(&own, bytes),
                shared: queues
                    .iter()
                    .any(|q| q.pids.len() > 1 && q.pids.contains(&pid)),
                slots: slots().map(|s| s.slot).collect(),
                open: match bytes {
                    false => Some(row.active.into()),
                    true => slots()
                        .filter_map(|slot| slot.open)
                        .reduce(u64::saturating_add),
                },
                chosen,
                rescues: slots().fold(0, |sum, s| sum.saturating_add(s.rescues)),
                state: worst.unwrap_or(&row.state).clone(),
                row,
            }
        })
        .collect();
    let largest = lines.iter().filter_map(|l| l.share).fold(0.0, f64::max);
    for line in &mut lines {
        line.bar = line
            .share
            .and_then(|share| part(share, largest))
            .unwrap_or(0.0);
    }
    Table {
        lines,
        share_of,
        shared: shared(&queues, bytes),
    }
}

/// More shared queues than this are only counted.
const MOST_SHARED: usize = 2;

fn shared(queues: &[Queue], bytes: bool) -> Vec<String> {
    let is_shown = |q: &&Queue| q.pids.len() != 1 && q.kept_by.is_none();
    let several: Vec<&Queue> = queues.iter().filter(is_shown).collect();
    let tell = |queue: &&Queue| {
        let length = sum(&[queue], bytes).unwrap_or_default();
        let who = match queue.pids.len() {
            0 => "nobody seen to serve it".to_owned(),
            n => format!("shared by {n} workers"),
        };
        format!("queue {length}, highest {}, {who}", queue.highest)
    };
    let mut told: Vec<String> = several.iter().take(MOST_SHARED).map(tell).collect();
    if several.len() > MOST_SHARED {
        told.push(format!("and {} more queues", several.len() - MOST_SHARED));
    }
    told
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

impl Line {
    /// Returns the text of a cell; of the share only the number.
    pub fn cell(&self, column: Column) -> String {
        let dash = || "-".to_owned();
        let row = &self.row;
        match column {
            Column::Pid => row.pid.to_string(),
            Column::Name => printable(&row.name),
            Column::Slot => match &self.slots[..] {
                [] => dash(),
                [one] => one.to_string(),
                [first, rest @ ..] => format!("{first}+{}", rest.len()),
            },
            Column::Share => self.share.map_or_else(dash, percent),
            Column::Active => self.open.map_or_else(dash, |open| open.to_string()),
            Column::Queue => match &self.queue {
                Some(queue) => queue.to_string(),
                None if self.shared => "shared".into(),
                None => dash(),
            },
            Column::Wait => row.wait_us_p99.map_or_else(dash, time),
            Column::Wakes => row
                .wakeups_per_connection
                .map_or_else(dash, |n| format!("{n:.2}")),
            Column::Cpu => percent(row.cpu),
            Column::Chosen => self.chosen.map_or_else(dash, percent),
            Column::Rescues => {
                if self.slots.is_empty() {
                    dash()
                } else {
                    self.rescues.to_string()
                }
            }
            Column::State => printable(&self.state),
        }
    }

    /// Returns the number that a column is sorted by, if it is one. The largest is of most interest, so it comes
    /// first.
    fn number(&self, column: Column) -> Option<f64> {
        let row = &self.row;
        match column {
            Column::Pid | Column::Name | Column::State | Column::Slot => None,
            Column::Share => self.share,
            Column::Active => self.open.map(|open| open as f64),
            Column::Queue => self.queue.map(|q| q.length as f64),
            Column::Wait => row.wait_us_p99,
            Column::Wakes => row.wakeups_per_connection,
            Column::Cpu => Some(row.cpu),
            Column::Chosen => self.chosen,
            Column::Rescues => Some(self.rescues as f64),
        }
    }
}

/// Sorts by a column, equal ones by process id. Numbers begin with the largest, unless the order is reversed; unknown
/// ones come last either way.
pub fn sort(lines: &mut [Line], column: Column, reversed: bool) {
    lines.sort_by(|a, b| {
        let (x, y) = (a.number(column), b.number(column));
        let order = match column {
            Column::Pid => a.row.pid.cmp(&b.row.pid),
            Column::Name => a.row.name.cmp(&b.row.name),
            Column::State => a.state.cmp(&b.state),
            Column::Slot => a.slots.cmp(&b.slots),
            _ if x.is_none() || y.is_none() => return x.is_none().cmp(&y.is_none()),
            _ => y.unwrap_or(0.0).total_cmp(&x.unwrap_or(0.0)),
        };
        let order = if reversed { order.reverse() } else { order };
        order.then(a.row.pid.cmp(&b.row.pid))
    });
}
