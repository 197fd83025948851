//! Text for a person, the same for every command: tables that leave columns out where a terminal is narrow, sentences
//! that are wrapped, colours where they are wanted. Pure: the same data and style give the same text.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// The properties of the reader's terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Style {
    /// Columns of the terminal; `None`: as wide as it takes, for a file or a program.
    pub width: Option<usize>,
    /// Whether colours are shown.
    pub colour: bool,
}

/// The meaning of a cell's colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tone {
    /// Nothing.
    #[default]
    Plain,
    /// As it should be.
    Good,
    /// On its way out, or not all there.
    Warning,
    /// Wrong.
    Bad,
    /// Of less interest.
    Dim,
    /// A heading.
    Bold,
}

impl Tone {
    /// That of a worker's or a slot's state.
    pub fn of_state(state: &str) -> Self {
        match state {
            "stopped" | "stuck" | "down" | "gone" => Tone::Bad,
            "draining" => Tone::Warning,
            "busy" | "up" => Tone::Good,
            _ => Tone::Plain,
        }
    }
}

/// A text in its colour, where colours are shown.
pub fn paint(text: &str, tone: Tone, style: Style) -> String {
    let code = match tone {
        _ if !style.colour || text.is_empty() => return text.to_owned(),
        Tone::Plain => return text.to_owned(),
        Tone::Good => "32",
        Tone::Warning => "33",
        Tone::Bad => "31",
        Tone::Dim => "2",
        Tone::Bold => "1",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// One field of a table.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// In a colour.
    pub fn toned(text: impl Into<String>, tone: Tone) -> Self {
        let text = text.into();
        Self { text, tone }
    }
}

impl<T: ToString> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::toned(text.to_string(), Tone::Plain)
    }
}

/// Returns the text without characters that a terminal would act on: U+009B begins a command as ESC [ does.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// A column of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// Its heading.
    pub title: &'static str,
    /// Where there is not room for all, the highest is left out first; 0 never.
    pub rank: u8,
    /// Words are set to the left, numbers to the right.
    pub words: bool,
}

/// A column of numbers.
pub const fn number(title: &'static str, rank: u8) -> Column {
    Column {
        title,
        rank,
        words: false,
    }
}

/// A column of words.
pub const fn words(title: &'static str, rank: u8) -> Column {
    Column {
        title,
        rank,
        words: true,
    }
}

const GAP: usize = 2;

/// A table, a line each, `indent` blanks before it. Each column is as wide as its longest cell. Where the terminal is
/// narrower than all of them, columns are left out, and a last column of words is cut.
pub fn table(columns: &[Column], rows: &[Vec<Cell>], indent: usize, style: Style) -> Vec<String> {
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(at, column)| {
            let cells = rows.iter().filter_map(|row| row.get(at));
            let longest = cells.map(|cell| cell.text.width()).max().unwrap_or(0);
            longest.max(column.title.width())
        })
        .collect();
    let shown = fitting(columns, &widths, indent, style);
    let line = |cells: &dyn Fn(usize) -> Option<Cell>| {
        let mut line = " ".repeat(indent);
        for at in &shown {
            let cell = cells(*at).unwrap_or_default();
            line.push_str(&set(&cell, columns[*at], widths[*at], style));
            line.push_str(&" ".repeat(GAP));
        }
        cut(line.trim_end(), style)
    };
    let title = |at: usize| Some(Cell::toned(columns[at].title, Tone::Bold));
    let mut lines = vec![line(&title)];
    lines.extend(rows.iter().map(|row| line(&|at| row.get(at).cloned())));
    lines
}

/// A last column of words is not cut to less than this.
const LEAST_WORDS: usize = 12;

/// The places of the columns that there is room for. A long last column of words may be cut to half of its width.
fn fitting(columns: &[Column], widths: &[usize], indent: usize, style: Style) -> Vec<usize> {
    let mut shown: Vec<usize> = (0..columns.len()).collect();
    let Some(room) = style.width else {
        return shown;
    };
    let least = |at: usize| {
        let cuttable = columns[at].words && at + 1 == columns.len();
        if cuttable {
            let least = columns[at].title.width().max(widths[at] / 2);
            widths[at].min(least.max(LEAST_WORDS))
        } else {
            widths[at]
        }
    };
    let taken = |shown: &[usize]| {
        let cells: usize = shown.iter().map(|at| least(*at) + GAP).sum();
        indent + cells.saturating_sub(GAP)
    };
    while taken(&shown) > room {
        let highest = shown.iter().map(|at| columns[*at].rank).max().unwrap_or(0);
        if highest == 0 {
            break;
        }
        shown.retain(|at| columns[*at].rank != highest);
    }
    shown
}

fn set(cell: &Cell, column: Column, width: usize, style: Style) -> String {
    let blanks = " ".repeat(width.saturating_sub(cell.text.width()));
    let text = paint(&cell.text, cell.tone, style);
    if column.words {
        text + &blanks
    } else {
        blanks + &text
    }
}

/// Cuts a line off where the terminal ends. Colours take no room, and none is cut open.
fn cut(line: &str, style: Style) -> String {
    let Some(room) = style.width else {
        return line.to_owned();
    };
    let (mut kept, mut taken, mut coded) = (String::new(), 0, false);
    let mut plain = 0;
    let mut code = false;
    for sign in line.chars() {
        code |= sign == '\x1b';
        if !code {
            plain += sign.width().unwrap_or(0);
        }
        code &= sign != 'm';
    }
    if plain <= room {
        return line.to_owned();
    }
    for sign in line.chars() {
        coded |= sign == '\x1b';
        let wide = if coded { 0 } else { sign.width().unwrap_or(0) };
        if taken + wide < room || coded {
            kept.push(sign);
            taken += wide;
        } else if taken < room {
            kept.push('…');
            taken = room;
        }
        coded &= sign != 'm';
    }
    kept
}

/// Sentences on as many lines as they take: `first` before the first line, and as many blanks before the others. No word
/// is broken.
pub fn wrap(text: &str, first: &str, style: Style) -> Vec<String> {
    let blanks = " ".repeat(first.width());
    let options = textwrap::Options::new(style.width.unwrap_or(usize::MAX))
        .initial_indent(first)
        .subsequent_indent(&blanks)
        .break_words(false)
        .word_separator(textwrap::WordSeparator::AsciiSpace)
        .word_splitter(textwrap::WordSplitter::NoHyphenation)
        .wrap_algorithm(textwrap::WrapAlgorithm::FirstFit);
    let lines = textwrap::wrap(text, options);
    lines.into_iter().map(String::from).collect()
}

/// Parts with a separator between, on as many lines as they take; no part is broken where it has room in a line.
pub fn pack(parts: &[String], separator: &str, first: &str, style: Style) -> Vec<String> {
    let room = style.width.unwrap_or(usize::MAX);
    let mut lines: Vec<String> = Vec::new();
    let blanks = " ".repeat(first.width());
    for part in parts {
        match lines.last_mut() {
            Some(line) if line.width() + separator.width() + part.width() <= room => {
                line.push_str(separator);
                line.push_str(part);
            }
            last => {
                let before = if last.is_some() { &blanks } else { first };
                lines.extend(wrap(part, before, style));
            }
        }
    }
    lines
}

/// A number with its noun.
pub fn count(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// The same for a noun whose plural, which is given, ends with an `s` more.
pub fn counted(number: u64, nouns: &str) -> String {
    count(number, nouns.strip_suffix('s').unwrap_or(nouns), nouns)
}

/// So many connections.
pub fn connections(number: u64) -> String {
    counted(number, "connections")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_is_no_plural() {
        let told = [0, 1, 2].map(|number| counted(number, "connections"));
        assert_eq!(told, ["0 connections", "1 connection", "2 connections"]);
    }

    const COLUMNS: [Column; 4] = [
        number("pid", 0),
        words("name", 2),
        number("share", 1),
        words("state", 0),
    ];

    fn rows() -> Vec<Vec<Cell>> {
        vec![
            vec![
                1.into(),
                "nginx".into(),
                "75%".into(),
                Cell::toned("stuck", Tone::Bad),
            ],
            vec![23456.into(), "漢字".into(), "5%".into(), "up".into()],
        ]
    }

    fn style(width: usize) -> Style {
        Style {
            width: Some(width),
            colour: false,
        }
    }

    #[test]
    fn columns_are_left_out_by_rank_where_a_terminal_is_narrow() {
        let wide = [
            "  pid  name   share  state",
            "    1  nginx    75%  stuck",
            "23456  漢字      5%  up",
        ];
        assert_eq!(table(&COLUMNS, &rows(), 0, Style::default()), wide);
        assert_eq!(table(&COLUMNS, &rows(), 0, style(26)), wide);
        assert_eq!(
            table(&COLUMNS, &rows(), 2, style(21)),
            [
                "    pid  share  state",
                "      1    75%  stuck",
                "  23456     5%  up"
            ]
        );
        assert_eq!(
            table(&COLUMNS, &rows(), 0, style(12)),
            ["  pid  state", "    1  stuck", "23456  up"]
        );
        // A line is cut before it wraps.
        assert_eq!(table(&COLUMNS, &rows(), 0, style(9))[1], "    1  s…");
    }

    #[test]
    fn a_long_last_column_of_words_is_cut_to_half_before_others_are_left_out() {
        let columns = [number("pid", 0), number("share", 1), words("address", 0)];
        for (longest, needed) in [(40, 20), (16, 12), (8, 8)] {
            let row = vec![1.into(), "75%".into(), "x".repeat(longest).into()];
            let head =
                |width| table(&columns, std::slice::from_ref(&row), 0, style(width)).remove(0);
            let others = "pid  share  ".len();
            assert_eq!(head(others + needed), "pid  share  address");
            assert_eq!(head(others + needed - 1), "pid  address");
        }
        let columns = [words("name", 0), number("share", 1), number("pid", 0)];
        let row = vec!["x".repeat(40).into(), "75%".into(), 1.into()];
        let lines = |width| table(&columns, std::slice::from_ref(&row), 0, style(width));
        assert_eq!(lines(52)[1].split_whitespace().nth(1), Some("75%"));
        assert_eq!(lines(51)[1].split_whitespace().nth(1), Some("1"));
    }

    #[test]
    fn states_and_tones_have_their_colours() {
        for (state, tone) in [
            ("stuck", Tone::Bad),
            ("gone", Tone::Bad),
            ("draining", Tone::Warning),
            ("up", Tone::Good),
            ("waiting", Tone::Plain),
        ] {
            assert_eq!(Tone::of_state(state), tone, "{state}");
        }
        let coloured = Style {
            width: None,
            colour: true,
        };
        for (tone, code) in [
            (Tone::Good, 32),
            (Tone::Warning, 33),
            (Tone::Bad, 31),
            (Tone::Dim, 2),
            (Tone::Bold, 1),
        ] {
            assert_eq!(paint("x", tone, coloured), format!("\x1b[{code}mx\x1b[0m"));
            assert_eq!(paint("", tone, coloured), "");
            assert_eq!(paint("x", tone, Style::default()), "x");
        }
        assert_eq!(paint("x", Tone::Plain, coloured), "x");
    }

    #[test]
    fn colours_take_no_room() {
        let coloured = Style {
            width: Some(26),
            colour: true,
        };
        let lines = table(&COLUMNS, &rows(), 0, coloured);
        assert_eq!(lines[1], "    1  nginx    75%  \x1b[31mstuck\x1b[0m");
        assert!(lines[0].contains("\x1b[1mpid\x1b[0m"));
        let narrow = Style {
            width: Some(9),
            ..coloured
        };
        assert_eq!(
            table(&COLUMNS, &rows(), 0, narrow)[1],
            "    1  \x1b[31ms…\x1b[0m"
        );
    }

    #[test]
    fn sentences_are_wrapped_and_parts_packed() {
        assert_eq!(
            wrap("one two three", "  why  ", style(15)),
            ["  why  one two", "       three"]
        );
        assert_eq!(
            wrap("one two three", "  why  ", style(14)),
            ["  why  one two", "       three"]
        );
        assert_eq!(
            wrap("one two three", "  why  ", style(13)),
            ["  why  one", "       two", "       three"]
        );
        let parts = ["aa bb".to_owned(), "cc".into(), "dd ee ff".into()];
        assert_eq!(pack(&parts, ", ", "", style(9)), ["aa bb, cc", "dd ee ff"]);
        assert_eq!(
            pack(&parts, ", ", "", style(8)),
            ["aa bb", "cc", "dd ee ff"]
        );
        let short = ["a".to_owned(), "b".into()];
        assert_eq!(pack(&short, ", ", "", style(4)), ["a, b"]);
        assert_eq!(pack(&short, ", ", "", style(3)), ["a", "b"]);
        assert_eq!(pack(&parts, ", ", "", Style::default()).len(), 1);
        assert_eq!(connections(1), "1 connection");
        assert_eq!(connections(2), "2 connections");
    }

    proptest! {
        #[test]
        fn no_line_is_wider_than_the_terminal(
            texts in prop::collection::vec("[a-z漢 ]{0,30}", 0..20),
            width in 20_usize..200,
            colour: bool,
        ) {
            let style = Style { width: Some(width), colour };
            let rows: Vec<Vec<Cell>> = texts
                .chunks(4)
                .map(|row| row.iter().map(|text| Cell::toned(text.clone(), Tone::Bad)).collect())
                .collect();
            for line in table(&COLUMNS, &rows, 2, style) {
                let plain = line.replace("\x1b[31m", "").replace("\x1b[1m", "").replace("\x1b[0m", "");
                prop_assert!(plain.width() <= width, "{line:?}");
            }
        }
    }
}
