//! The picture of a state: the same for the same state and size.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{
    Block, Cell, Clear, Paragraph, RenderDirection, Row, Sparkline, Table, TableState, Wrap,
};

use crate::plain;
use crate::state::{Moment, Show, Source, State};
use crate::table::{self, Column, Form, ShareOf};

const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, state: &State) {
    let area = frame.area();
    match (state.current(), state.table()) {
        (Some(show), Some(table)) => listener(frame, area, state, show, &table),
        _ => frame.render_widget(Paragraph::new("nothing seen yet"), area),
    }
    if state.help {
        help(frame, area, state);
    }
}

/// Draws the parts of a listener from top to bottom: title and totals, charts, workers, keys.
fn listener(frame: &mut Frame<'_>, area: Rect, state: &State, show: &Show, table: &table::Table) {
    let small = area.height < 20;
    let top = head(area, state, show, table);
    let charts = Charts::fitting(area, state.steering().is_some(), &show.frame);
    let note = if small { None } else { note(show) };
    let [head, rate, workers, foot, keys] = Layout::vertical([
        Constraint::Length(top.len() as u16),
        Constraint::Length(charts.height()),
        Constraint::Min(2),
        Constraint::Length(u16::from(note.is_some())),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(top), head);
    charts.draw(frame, rate, show);
    let below = rows(frame, workers, state, table);
    frame.render_widget(Paragraph::new(note.unwrap_or_default()).style(DIM), foot);
    frame.render_widget(bottom(state, below, keys.width), keys);
}

/// Returns the lines above the table; on a small screen the most telling of them.
fn head<'a>(area: Rect, state: &State, show: &Show, table: &table::Table) -> Vec<Line<'a>> {
    let room = usize::from(area.width);
    let (totals, others) = match area.height {
        0..20 => (2, 1),
        _ => (usize::MAX, usize::MAX),
    };
    let mut lines = vec![title(state, show)];
    let packed_totals = packed(&plain::totals(&show.frame), room);
    lines.extend(packed_totals.into_iter().take(totals).map(Line::from));
    let shared = table.shared.iter().take(others);
    lines.extend(shared.map(|s| Line::from(s.clone())));
    if let Some(steering) = state.steering() {
        let told = packed(&plain::steering(steering), room);
        let told = told.into_iter().take(others);
        lines.extend(told.map(|line| Line::styled(line, Color::Cyan)));
    }
    lines.truncate(usize::from(area.height / 2).max(1));
    lines
}

/// Words on as many lines as they take.
fn packed(words: &[String], width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 3 + word.chars().count() <= width => {
                line.push_str(" · ");
                line.push_str(word);
            }
            _ => lines.push(word.clone()),
        }
    }
    lines
}

fn title<'a>(state: &State, show: &Show) -> Line<'a> {
    let badge = |text: String| Span::styled(format!(" {text} "), Modifier::REVERSED);
    let mut spans = Vec::new();
    if state.shows.len() > 1 {
        spans.push(badge(format!("{}/{}", state.tab + 1, state.shows.len())));
    }
    if state.source == Source::Replay {
        spans.push(badge("replay".into()));
    }
    if state.paused {
        spans.push(badge("paused".into()));
    }
    if !spans.is_empty() {
        spans.push(Span::raw(" "));
    }
    spans.push(Span::styled(plain::headline(&show.frame.watch), BOLD));
    Line::from(spans)
}

fn note(show: &Show) -> Option<String> {
    let notes: Vec<String> = plain::notes(&show.frame.watch).collect();
    match &notes[..] {
        [] => None,
        [one] => Some(format!("note: {one}")),
        [first, ..] => Some(format!("{} notes (? shows all): {first}", notes.len())),
    }
}

/// One chart, with a bar for each refresh.
struct Chart {
    title: &'static str,
    of: fn(&Moment) -> u64,
    colour: Color,
}

const RATE: Chart = Chart {
    title: "conn/s",
    of: |moment| moment.rate,
    colour: Color::Green,
};
/// The charts that a large screen shows beside it.
const OTHERS: [Chart; 4] = [
    Chart {
        title: "waiting",
        of: |moment| moment.queued,
        colour: Color::Blue,
    },
    Chart {
        title: "oldest, ms",
        of: |moment| moment.oldest_ms,
        colour: Color::Yellow,
    },
    Chart {
        title: "dropped",
        of: |moment| moment.dropped,
        colour: Color::Red,
    },
    Chart {
        title: "moved",
        of: |moment| moment.moved,
        colour: Color::Cyan,
    },
];

/// The history of the listener, as much of it as there is room for.
struct Charts {
    shown: Vec<&'static Chart>,
    /// Lines of each.
    each: u16,
    /// Charts beside each other.
    beside: u16,
}

impl Charts {
    fn fitting(area: Rect, steered: bool, frame: &crate::Frame) -> Self {
        let each = match area.height {
            0..12 => 0,
            12..20 => 1,
            20..45 => 3,
            _ => 4,
        };
        let (first, others) = match plain::counts_connections(&frame.watch) {
            true => (&RATE, &OTHERS[..]),
            false => (&OTHERS[0], &OTHERS[1..]),
        };
        let mut shown = vec![first];
        let beside = if area.width >= 100 { 2 } else { 1 };
        // The workers get half of the screen.
        if area.height >= 36 {
            shown.extend(others.iter().filter(|one| steered || one.title != "moved"));
        }
        Self {
            shown,
            each,
            beside,
        }
    }

    fn rows(&self) -> u16 {
        (self.shown.len() as u16).div_ceil(self.beside)
    }

    fn height(&self) -> u16 {
        // An empty line between two.
        match self.rows() {
            1 => self.each,
            rows => rows * (self.each + 1),
        }
    }

    fn draw(&self, frame: &mut Frame<'_>, area: Rect, show: &Show) {
        if self.shown.len() == 1 {
            return sparkline(frame, area, show, self.shown[0]);
        }
        let rows = Layout::vertical(vec![Constraint::Length(self.each + 1); self.rows().into()]);
        let rows = rows.split(area);
        for (row, charts) in rows.iter().zip(self.shown.chunks(self.beside.into())) {
            let parts = vec![Constraint::Fill(1); self.beside.into()];
            let cells = Layout::horizontal(parts).spacing(2).split(*row);
            for (cell, chart) in cells.iter().zip(charts) {
                let height = self.each.min(cell.height);
                sparkline(frame, Rect { height, ..*cell }, show, chart);
            }
        }
    }
}

/// One figure over time, the newest on the right.
fn sparkline(frame: &mut Frame<'_>, area: Rect, show: &Show, chart: &Chart) {
    const LABEL: u16 = 12;
    let [label, graph] =
        Layout::horizontal([Constraint::Length(LABEL), Constraint::Min(0)]).areas(area);
    let shown: Vec<u64> = show
        .history
        .iter()
        .take(usize::from(graph.width))
        .map(chart.of)
        .collect();
    let highest = shown.iter().copied().max().unwrap_or(0);
    let now = shown.first().copied().unwrap_or(0);
    let words: Vec<Line<'_>> = match area.height {
        0 => return,
        1 => vec![Line::from(format!("{} {}", chart.title, short(now)))],
        height => {
            let mut words = vec![Line::from(chart.title); usize::from(height)];
            words[1] = Line::from(format!("now {}", short(now)));
            words[usize::from(height) - 1] = Line::from(format!("max {}", short(highest)));
            if height > 2 {
                words[2..usize::from(height) - 1].fill(Line::default());
            }
            words
        }
    };
    frame.render_widget(Paragraph::new(words).style(DIM), label);
    let bars = Sparkline::default()
        .data(shown)
        .direction(RenderDirection::RightToLeft)
        .max(highest.max(1))
        .style(chart.colour);
    frame.render_widget(bars, graph);
}

/// A number in five letters at the most.
fn short(number: u64) -> String {
    match number {
        0..100_000 => number.to_string(),
        100_000..10_000_000 => format!("{}k", number / 1000),
        10_000_000..10_000_000_000 => format!("{}M", number / 1_000_000),
        _ => "huge".into(),
    }
}

/// Draws the workers; returns how many had no room below.
fn rows(frame: &mut Frame<'_>, area: Rect, state: &State, table: &table::Table) -> usize {
    let mut columns = table::fitting(area.width, state.steering().is_some());
    if table.share_of == ShareOf::Choices {
        // It would repeat the share.
        columns.retain(|(form, _)| form.column != Column::Chosen);
    }
    let title = |form: &Form| {
        let title = match form.column {
            Column::Share => table.share_of.title(),
            _ => form.title,
        };
        if form.column != state.sort {
            return Span::styled(title, BOLD);
        }
        let style = BOLD.add_modifier(Modifier::UNDERLINED);
        Span::styled(title, style)
    };
    let header = Row::new(columns.iter().map(|(form, _)| {
        let text = Text::from(title(form));
        Cell::from(if form.words {
            text
        } else {
            text.alignment(Alignment::Right)
        })
    }));
    let body = table.lines.iter().map(|line| {
        let cells = columns.iter().map(|(form, width)| cell(line, form, *width));
        Row::new(cells.collect::<Vec<_>>())
    });
    let widths = columns.iter().map(|(_, width)| Constraint::Length(*width));
    let widget = Table::new(body, widths)
        .header(header)
        .column_spacing(1)
        .row_highlight_style(Modifier::REVERSED);
    let at = |pid| table.lines.iter().position(|l| l.row.pid == pid);
    // The scroll position depends on the state alone: the selected worker is on the screen.
    let mut place = TableState::new().with_selected(state.selected.and_then(at));
    frame.render_stateful_widget(widget, area, &mut place);
    let room = usize::from(area.height).saturating_sub(1);
    table.lines.len().saturating_sub(place.offset() + room)
}

fn cell<'a>(line: &table::Line, form: &Form, width: u16) -> Cell<'a> {
    let text = line.cell(form.column);
    match form.column {
        Column::Share => Cell::from(Line::from(vec![
            Span::styled(
                bar(line.bar, usize::from(width).saturating_sub(5)),
                Color::Green,
            ),
            Span::raw(format!(" {text:>4}")),
        ])),
        Column::State => Cell::from(Span::styled(text.clone(), of_state(&text))),
        _ if form.words => Cell::from(text),
        _ => Cell::from(Text::from(text).alignment(Alignment::Right)),
    }
}

fn of_state(state: &str) -> Style {
    match state {
        "stopped" | "stuck" | "down" | "gone" => Style::new().fg(Color::Red),
        "draining" => Style::new().fg(Color::Yellow),
        "busy" => Style::new().fg(Color::Green),
        _ => Style::new(),
    }
}

/// A bar in eighths of a cell, filled up with blanks.
pub(crate) fn bar(part: f64, width: usize) -> String {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let eighths = (part.clamp(0.0, 1.0) * (width * 8) as f64).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        bar.push(EIGHTHS[eighths % 8]);
    }
    let filled = eighths.div_ceil(8);
    bar + &" ".repeat(width - filled)
}

/// Returns how many workers are not seen, and the last key's result or the keys.
fn bottom<'a>(state: &State, below: usize, width: u16) -> Paragraph<'a> {
    let mut spans = Vec::new();
    if below > 0 {
        spans.push(Span::styled(format!("{below} more below"), BOLD));
        spans.push(Span::raw("  "));
    }
    if let Some(choice) = &state.choice {
        let asked = format!(
            "{}: {} instead of {}? enter yes, c another, esc no",
            choice.group,
            choice.to,
            choice.from.as_deref().unwrap_or("its policy")
        );
        let asked = wakeone_model::layout::printable(&asked);
        spans.push(Span::styled(asked, BOLD.fg(Color::Yellow)));
        return Paragraph::new(Line::from(spans));
    }
    if let Some(notice) = &state.notice {
        let notice = wakeone_model::layout::printable(notice);
        spans.push(Span::styled(notice, Color::Yellow));
        return Paragraph::new(Line::from(spans));
    }
    let sorted = table::FORMS.iter().find(|f| f.column == state.sort);
    let sorted = sorted.map_or("", |f| f.title);
    let mut keys = vec![
        ("q", "quit".to_owned()),
        ("?", "help".to_owned()),
        ("s", format!("sort: {sorted}")),
        ("r", "reverse".to_owned()),
        ("p", "pause".to_owned()),
    ];
    if state.shows.len() > 1 {
        keys.push(("tab", "next".to_owned()));
    }
    if state.steering().is_some() && state.source == Source::Live {
        keys.push(("c", "policy".to_owned()));
        keys.push(("d", "drain".to_owned()));
        keys.push(("m", "move queue".to_owned()));
    }
    let mut used: usize = spans.iter().map(Span::width).sum();
    for (key, does) in keys {
        let wide = key.len() + does.len() + 1;
        if used + wide > usize::from(width) {
            break;
        }
        used += wide + 2;
        spans.push(Span::styled(key, Modifier::REVERSED));
        spans.push(Span::raw(format!(" {does}  ")));
    }
    Paragraph::new(Line::from(spans))
}

/// Draws an explanation of keys and columns, and the notes on data that cannot be seen, over the
/// picture.
fn help(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let mut lines = vec![
        "q quit, p pause, tab next listener, up and down select a worker, esc none",
        "s sort by the next column, r the other way",
        "Of steered groups: c another policy (asks first), u back to the one before;",
        "d no new connections for the selected worker's slot, or again some;",
        "m move what waits for it to the others now",
        "",
        "share: of connections; without tracing of choices or CPU; longest bar: largest",
        "open: connections that it holds; chosen: its part of the policy's choices",
        "queue: waiting/limit, of the queue that this worker alone serves",
        "wait p99: 99 of 100 waited no longer in the queue; those that wait still count",
        "wakeups: threads woken for each connection, of this worker",
        "moves: times its queue was moved; moved: connections that were moved",
        "busiest/mean: the largest share over the mean one; 1 is even",
    ]
    .into_iter()
    .map(Line::from)
    .collect::<Vec<_>>();
    if let Some(show) = state.current() {
        lines.extend(
            plain::notes(&show.frame.watch).map(|note| Line::styled(format!("note: {note}"), DIM)),
        );
    }
    let inner = area.width.saturating_sub(4).min(76);
    let wrapped = |line: &Line<'_>| line.width().div_ceil(usize::from(inner.max(1))).max(1);
    // Words do not break where lines end: a line more for each two.
    let height: usize = lines.iter().map(wrapped).sum::<usize>() + lines.len() / 3;
    let height = (height as u16).saturating_add(2).min(area.height);
    let width = (inner + 2).min(area.width);
    let place = Rect {
        x: area.x + (area.width - width) / 2,
        y: area.y + (area.height - height) / 2,
        width,
        height,
    };
    frame.render_widget(Clear, place);
    let block = Block::bordered().title(" help: any key closes it ");
    let text = Paragraph::new(lines).wrap(Wrap { trim: true }).block(block);
    frame.render_widget(text, place);
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::buffer::Buffer;

    use super::*;
    use crate::fixtures;
    use crate::frame;
    use crate::state::Key;

    fn buffer(state: &State, width: u16, height: u16) -> Buffer {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("terminal");
        terminal.draw(|frame| draw(frame, state)).expect("draws");
        terminal.backend().buffer().clone()
    }

    fn screen(state: &State, width: u16, height: u16) -> Vec<String> {
        let buffer = buffer(state, width, height);
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect();
        (0..height).map(line).collect()
    }

    fn showing(frames: Vec<frame::Frame>) -> State {
        let mut state = State::new(Source::Live);
        state.refresh(frames);
        state
    }

    fn line<'a>(screen: &'a [String], with: &str) -> &'a str {
        let found = screen.iter().find(|line| line.contains(with));
        found.unwrap_or_else(|| panic!("no {with:?} in:\n{}", screen.join("\n")))
    }

    fn picture(screen: &[String]) -> String {
        let lines: Vec<&str> = screen.iter().map(|line| line.trim_end()).collect();
        lines.join("\n")
    }

    const SIZES: [(u16, u16); 3] = [(80, 24), (40, 12), (160, 50)];

    #[test]
    fn one_socket_shared_by_three_workers() {
        let state = showing(vec![fixtures::shared()]);
        for (width, height) in SIZES {
            let screen = screen(&state, width, height);
            insta::assert_snapshot!(format!("shared-{width}x{height}"), picture(&screen));
            line(&screen, "tcp 127.0.0.1:8080  server");
            line(&screen, "800 connections/s");
            line(&screen, "queue 3/64, highest 12");
            let (most, less, none) = (
                line(&screen, " 301 "),
                line(&screen, " 302 "),
                line(&screen, " 303 "),
            );
            assert!(most.contains("75%") && less.contains("25%") && none.contains("0%"));
            assert!(most.contains("busy") && less.contains("waiting") && none.contains("stopped"));
            assert!(most.contains("shared"), "the queue is told once, above");
            let full = |line: &str| line.matches('█').count();
            assert!(full(most) >= 3 * full(less).max(1), "bars by share");
            assert_eq!(full(none), 0);
        }
        let wide = screen(&state, 160, 50);
        // 900 wake-ups for 600 connections of all 800; a wait of 100 to 103 µs; 90 % of a CPU; 7 open.
        for word in ["1.12", "101 µs", "90%", " 7 "] {
            assert!(line(&wide, " 301 ").contains(word), "{word}");
        }
        line(&wide, "10 open");
        line(&wide, "1.50 wake-ups a connection");
        // One worker took nothing: 75 % of the shares over a third.
        line(&wide, "busiest/mean 2.25 by connections");
    }

    #[test]
    fn a_steered_group_with_a_slot_that_drains() {
        let mut state = showing(vec![fixtures::steered()]);
        let mut later = fixtures::steered();
        for slot in &mut later.steering.as_mut().expect("steered").slots {
            slot.selected += if slot.slot == 0 { 30 } else { 10 };
        }
        state.refresh(vec![later]);
        for (width, height) in SIZES {
            let screen = screen(&state, width, height);
            insta::assert_snapshot!(format!("steered-{width}x{height}"), picture(&screen));
            line(&screen, "group web · policy least-connections");
            assert!(line(&screen, " 403 ").contains("draining"));
            assert!(line(&screen, " 404 ").contains("4/64"));
            assert!(line(&screen, " 401 ").contains("waiting"));
        }
        let wide = screen(&state, 160, 50);
        // Of the choices since the refresh before, not of all: 30 of 60.
        assert!(line(&wide, " 401 ").contains(" 50% "));
        line(&wide, "8 connections moved");
        line(&wide, "c policy  d drain");
        for chart in ["conn/s", "waiting", "oldest, ms", "dropped", "moved"] {
            line(&wide, chart);
        }
        let header = line(&wide, "moves ");
        for title in ["slot", "chosen", "moves", "queue", "wakeups", "state"] {
            assert!(header.contains(title), "{title}");
        }
    }

    #[test]
    fn what_is_not_known_is_a_dash_and_said_once() {
        let state = showing(vec![fixtures::untraced()]);
        let screen = screen(&state, 80, 24);
        insta::assert_snapshot!("untraced-80x24", picture(&screen));
        line(&screen, "321 connections/s in the namespace");
        line(&screen, "cpu share");
        assert!(line(&screen, " 301 ").contains("78%"));
        assert!(line(&screen, " 301 ").contains(" - "));
        line(&screen, "note: the tracepoints may not be used");
    }

    #[test]
    fn marks_tell_what_the_view_does() {
        let mut state = showing(vec![
            fixtures::shared(),
            fixtures::at(fixtures::steered(), 81),
        ]);
        assert!(screen(&state, 80, 24)[0].starts_with(" 1/2 "));
        state.press(Key::Tab);
        state.press(Key::Char('p'));
        let paused = screen(&state, 80, 24);
        assert!(
            paused[0].starts_with(" 2/2  paused  tcp 127.0.0.1:81"),
            "{}",
            paused[0]
        );
        state.press(Key::Char('?'));
        line(&screen(&state, 80, 24), "help: any key closes it");
        state.press(Key::Char('x'));
        state.press(Key::Char('d'));
        assert!(
            line(&screen(&state, 80, 24), "select a worker").starts_with("select a worker first")
        );
    }

    #[test]
    fn the_worker_selected_is_marked_and_on_the_screen() {
        let mut frame = fixtures::shared();
        let look = frame.watch.last.workers[&302].clone();
        for pid in 1000..1100 {
            frame.watch.last.workers.insert(pid, look.clone());
        }
        let mut state = showing(vec![frame]);
        line(&screen(&state, 80, 24), " more below");
        state.press(Key::Up);
        let buffer = buffer(&state, 80, 24);
        let row = (0..24).find(|y| {
            let text: String = (0..80).map(|x| buffer[(x, *y)].symbol()).collect();
            text.contains(" 1099 ")
        });
        let row = row.expect("the last worker is on the screen");
        let style = buffer[(10, row)].style();
        assert!(style.add_modifier.contains(Modifier::REVERSED));
    }

    #[test]
    fn no_size_is_too_small_and_no_name_acts_on_the_terminal() {
        let mut frame = fixtures::steered();
        for worker in frame.watch.last.workers.values_mut() {
            worker.name = "\u{1b}[2Jé漢字".repeat(50);
        }
        let mut state = showing(vec![frame, fixtures::at(fixtures::untraced(), 9)]);
        for help in [false, true] {
            state.help = help;
            for (width, height) in (0..50).flat_map(|w| (0..30).map(move |h| (w, h))) {
                let screen = screen(&state, width, height);
                assert!(!screen.join("").contains(char::is_control));
            }
        }
        let mut empty = State::new(Source::Live);
        assert!(screen(&empty, 80, 24)[0].starts_with("nothing seen yet"));
        for key in ['s', 'r', 'd', 'c', 'j', 'k', 'p', '?'] {
            empty.press(Key::Char(key));
            empty.press(Key::Tab);
            empty.press(Key::BackTab);
        }
    }

    #[test]
    fn bars_are_in_eighths() {
        assert_eq!(bar(1.0, 3), "███");
        assert_eq!(bar(0.5, 3), "█▌ ");
        assert_eq!(bar(0.01, 3), "   ");
        assert_eq!(bar(0.0, 2), "  ");
        assert_eq!(bar(7.0, 2), "██");
        assert_eq!(bar(f64::NAN, 2), "  ");
        assert_eq!(bar(1.0, 0), "");
    }
}
