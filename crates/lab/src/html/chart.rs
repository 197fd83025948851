//! Charts as SVG, drawn by plotters twice: wide for screen and paper, narrow for a phone, where shrunken text is no text.
//!
//! Colours are of the Okabe-Ito family (told apart with any common colour blindness), dark enough for thin lines on white;
//! the style sheet exchanges them on a dark page. Series carry direct labels wherever there is room for them.

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::distribution::Distribution;
use crate::error::Error;
use crate::present::{Bar, Kind, Style, Times, number};
use crate::stats;

/// Width for screens and paper.
pub const WIDE: u32 = 760;
/// Width for phones.
pub const NARROW: u32 = 350;

const INK: RGBColor = RGBColor(0x1f, 0x23, 0x28);
const MUTED: RGBColor = RGBColor(0x5b, 0x63, 0x6d);
const GRID: RGBColor = RGBColor(0xd8, 0xdc, 0xe1);
const PAPER: RGBColor = RGBColor(0xff, 0xff, 0xff);
/// The colour of bad values.
const BAD: RGBColor = RGBColor(0xb3, 0x26, 0x1e);
const PALETTE: [RGBColor; 9] = [
    RGBColor(0x6b, 0x72, 0x80),
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xaa, 0x33, 0x77),
    RGBColor(0xb8, 0x7a, 0x00),
    RGBColor(0x00, 0x80, 0x5e),
    RGBColor(0xc4, 0x4e, 0x00),
    RGBColor(0x33, 0x22, 0x88),
    RGBColor(0x7a, 0x4a, 0x21),
    RGBColor(0x5f, 0x6b, 0x00),
];

/// Height of a line of text, in pixels.
const LINE: i32 = 17;
/// Font size of everything in a chart; plotters writes it down smaller by 1.24 into the SVG.
const FONT: f64 = 15.0;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A chart as a file of its own, on white paper.
///
/// # Errors
/// When plotters cannot draw it.
pub fn file(kind: &Kind) -> Result<String, Error> {
    let paper = "<rect width=\"100%\" height=\"100%\" fill=\"#FFFFFF\"/>";
    let drawn = draw(kind, WIDE)?;
    let begin = drawn.find('>').map_or(0, |at| at + 1);
    Ok(format!("{}\n{paper}{}", &drawn[..begin], &drawn[begin..]))
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Chart(error.to_string())
}

fn colour(style: &Style) -> RGBColor {
    PALETTE[style.colour % PALETTE.len()]
}

fn text_style<'a>(ink: RGBColor, horizontal: HPos, vertical: VPos) -> TextStyle<'a> {
    ("sans-serif", FONT)
        .into_font()
        .color(&ink)
        .pos(Pos::new(horizontal, vertical))
}

fn write(
    area: &Area<'_>,
    text: impl Into<String>,
    at: (i32, i32),
    style: &TextStyle<'_>,
) -> Result<(), Error> {
    area.draw(&Text::new(text.into(), at, style.clone()))
        .map_err(failed)
}

/// About how wide a text is, in pixels: a sans-serif's mean.
fn width_of(text: &str) -> i32 {
    (text.chars().count() as f64 * FONT / 1.24 * 0.56) as i32
}

/// Draws a chart as an `<svg>` element that scales with its container.
///
/// # Errors
/// When plotters cannot draw it.
pub fn draw(kind: &Kind, width: u32) -> Result<String, Error> {
    let height = height(kind, width);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (width, height)).into_drawing_area();
        match kind {
            Kind::Percentiles { unit, series } => percentiles(&area, unit, series, width)?,
            Kind::Doublings { unit, rows } => doublings(&area, unit, rows, width)?,
            Kind::Bars { unit, bars, log } => draw_bars(&area, unit, bars, *log, width)?,
            Kind::Times { heads, bad, rows } => times(&area, heads, *bad, rows, width)?,
            Kind::Shares { rows } => shares(&area, rows, width)?,
            Kind::Lines { x, y, log, series } => lines(&area, (x, y), *log, series, width)?,
        }
        area.present().map_err(failed)?;
    }
    // The size follows from the view box and the style sheet; the fixed one would not shrink.
    Ok(svg.replacen(&format!("width=\"{width}\" height=\"{height}\" "), "", 1))
}

fn height(kind: &Kind, width: u32) -> u32 {
    let key = |n: usize| {
        if width < 500 {
            n as u32 * LINE as u32
        } else {
            0
        }
    };
    match kind {
        Kind::Percentiles { series, .. } => {
            if width < 500 {
                280 + key(series.len())
            } else {
                360
            }
        }
        Kind::Lines { series, .. } => {
            if width < 500 {
                280 + key(series.len())
            } else {
                380
            }
        }
        Kind::Doublings { rows, .. } => rows.len() as u32 * RIDGE as u32 + 46,
        Kind::Bars { bars, .. } => bars.len() as u32 * 40 + 30,
        Kind::Times { rows, .. } => {
            (LINE + 6) as u32 + rows.len() as u32 * Grid::of(rows, width).row as u32
        }
        Kind::Shares { rows } => rows.len() as u32 * 46 + 24,
    }
}

/// A line of a chart with axes: look and points.
struct Line<'a> {
    style: &'a Style,
    points: Vec<(f64, f64)>,
}

/// Latency over the percentile; the axis is in nines, so that the slowest have room.
fn percentiles(
    area: &Area<'_>,
    unit: &str,
    series: &[(Style, Distribution)],
    width: u32,
) -> Result<(), Error> {
    const NINES: f64 = 3.0;
    let drawn: Vec<Line<'_>> = series
        .iter()
        .map(|(style, distribution)| {
            // Beyond the last nine there is too little data.
            let nines = |share: f64| -(1.0 - share).max(1e-9).log10();
            let points = distribution.quantiles().into_iter();
            let points = points
                .map(|(share, value)| (nines(share), value.log2()))
                .collect();
            Line {
                style,
                points: clip(points, NINES),
            }
        })
        .collect();
    let values = || drawn.iter().flat_map(|l| l.points.iter().map(|p| p.1));
    let (low, high) = (
        values().fold(f64::MAX, f64::min).floor(),
        values().fold(f64::MIN, f64::max).ceil(),
    );
    let nine = |x: f64| {
        ["0 %", "90 %", "99 %", "99.9 %"]
            .get(x.round() as usize)
            .map_or_else(String::new, |n| (*n).to_owned())
    };
    let axes = Axes {
        x: 0.0..NINES,
        y: low..high.max(low + 1.0),
        x_ticks: whole(0.0, NINES),
        y_ticks: whole(low, high.max(low + 1.0)),
        x_label: &nine,
        y_label: &power_of_two,
        x_name: "share of requests that were at most this slow",
        y_name: unit,
        marks: false,
    };
    axes.draw(area, &drawn, width)
}

/// 2^y without a trail of zeros.
fn power_of_two(y: f64) -> String {
    let value = y.exp2();
    if value >= 1.0 {
        format!("{value:.0}")
    } else {
        number(value)
    }
}

/// Ends a curve at `limit`, with a point there.
fn clip(points: Vec<(f64, f64)>, limit: f64) -> Vec<(f64, f64)> {
    let mut kept: Vec<(f64, f64)> = Vec::new();
    for (x, y) in points {
        match kept.last().copied() {
            Some((px, py)) if x > limit => {
                kept.push((limit, py + (y - py) * (limit - px) / (x - px)));
                break;
            }
            _ => kept.push((x, y)),
        }
    }
    kept
}

/// Curves over numbers.
fn lines(
    area: &Area<'_>,
    names: (&str, &str),
    log: bool,
    series: &[(Style, Vec<(f64, f64)>)],
    width: u32,
) -> Result<(), Error> {
    let scale = |v: f64| if log { v.max(1e-9).log10() } else { v };
    let unscale = move |v: f64| if log { 10f64.powf(v) } else { v };
    let drawn: Vec<Line<'_>> = series
        .iter()
        .map(|(style, points)| Line {
            style,
            points: points.iter().map(|(x, y)| (scale(*x), scale(*y))).collect(),
        })
        .collect();
    let all = || drawn.iter().flat_map(|l| l.points.iter());
    let range = |values: Vec<f64>| {
        let (low, high) = (stats::min(&values), stats::max(&values));
        let low = if log { low } else { 0.0 };
        let room = (high - low).max(1e-9) * 0.05;
        (if log { low - room } else { low })..high + room
    };
    // The conversion through logarithms leaves a small error: 29.999999.
    let label = move |v: f64| number((unscale(v) * 1e6).round() / 1e6);
    let (xs, ys) = (
        range(all().map(|p| p.0).collect()),
        range(all().map(|p| p.1).collect()),
    );
    let ticks = |r: &std::ops::Range<f64>, most| {
        if log {
            log_ticks(r.start, r.end, most)
        } else {
            even_ticks(r.start, r.end, most)
        }
    };
    let axes = Axes {
        x_ticks: ticks(&xs, if width < 500 { 5 } else { 10 }),
        y_ticks: ticks(&ys, 8),
        x: xs,
        y: ys,
        x_label: &label,
        y_label: &label,
        x_name: names.0,
        y_name: names.1,
        marks: true,
    };
    axes.draw(area, &drawn, width)
}

/// Axes and their labels.
struct Axes<'a> {
    x: std::ops::Range<f64>,
    y: std::ops::Range<f64>,
    /// The values at which the axes are labelled.
    x_ticks: Vec<f64>,
    y_ticks: Vec<f64>,
    x_label: &'a dyn Fn(f64) -> String,
    y_label: &'a dyn Fn(f64) -> String,
    x_name: &'a str,
    y_name: &'a str,
    /// Dots at the points: where each is a measurement.
    marks: bool,
}

impl Axes<'_> {
    /// Lines at the heights that are labelled, and the labels and names of both axes.
    fn draw_grid(&self, area: &Area<'_>, chart: &Plot<'_, '_>) -> Result<(), Error> {
        let at = |x: f64, y: f64| chart.backend_coord(&(x, y));
        let (left, bottom) = at(self.x.start, self.y.start);
        let (right, _) = at(self.x.end, self.y.start);
        let rule = |from, to| {
            area.draw(&PathElement::new([from, to], GRID.stroke_width(1)))
                .map_err(failed)
        };
        rule((left, bottom), (right, bottom))?;
        for tick in &self.y_ticks {
            let (_, y) = at(self.x.start, *tick);
            rule((left, y), (right, y))?;
            write(
                area,
                (self.y_label)(*tick),
                (left - 6, y),
                &text_style(MUTED, HPos::Right, VPos::Center),
            )?;
        }
        for tick in &self.x_ticks {
            let (x, _) = at(*tick, self.y.start);
            rule((x, bottom), (x, bottom + 4))?;
            write(
                area,
                (self.x_label)(*tick),
                (x, bottom + 8),
                &text_style(MUTED, HPos::Center, VPos::Top),
            )?;
        }
        let middle = (left + right) / 2;
        write(
            area,
            self.x_name,
            (middle, bottom + 8 + LINE),
            &text_style(MUTED, HPos::Center, VPos::Top),
        )
    }

    fn draw(&self, area: &Area<'_>, lines: &[Line<'_>], width: u32) -> Result<(), Error> {
        let narrow = width < 500;
        let labels = lines
            .iter()
            .map(|l| width_of(&l.style.label))
            .max()
            .unwrap_or(0);
        let (top, plot) = area.split_vertically(if narrow {
            LINE * lines.len() as i32 + LINE
        } else {
            LINE + 4
        });
        write(
            &top,
            self.y_name,
            (0, 0),
            &text_style(MUTED, HPos::Left, VPos::Top),
        )?;
        let mut chart = ChartBuilder::on(&plot)
            .margin_right(if narrow { 26 } else { labels + 22 })
            .margin_top(6)
            .x_label_area_size(44)
            .y_label_area_size(58)
            .build_cartesian_2d(self.x.clone(), self.y.clone())
            .map_err(failed)?;
        self.draw_grid(area, &chart)?;
        for line in lines {
            draw_line(&mut chart, line, self.marks)?;
        }
        let ends: Vec<(i32, i32)> = lines
            .iter()
            .map(|l| l.points.last().map_or((0, 0), |p| chart.backend_coord(p)))
            .collect();
        if narrow {
            key(&top, lines)
        } else {
            label_ends(area, lines, &ends, width as i32 - labels - 14)
        }
    }
}

/// A chart of two axes of numbers.
type Plot<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// The whole numbers of a range.
fn whole(from: f64, to: f64) -> Vec<f64> {
    (from.ceil() as i64..=to.floor() as i64)
        .map(|n| n as f64)
        .collect()
}

/// Places of 1, 2 and 5 times the powers of ten in a range of logarithms; only of the powers where that were too many.
fn log_ticks(from: f64, to: f64, most: usize) -> Vec<f64> {
    let of = |steps: &[f64]| -> Vec<f64> {
        let decades = from.floor() as i64..=to.ceil() as i64;
        let all = decades.flat_map(|d| steps.iter().map(move |s| d as f64 + s.log10()));
        all.filter(|t| (from..=to).contains(t)).collect()
    };
    [&[1.0, 2.0, 5.0][..], &[1.0, 3.0], &[1.0]]
        .iter()
        .map(|s| of(s))
        .find(|t| t.len() <= most)
        .unwrap_or_else(|| of(&[1.0]))
}

/// Round numbers in a range.
fn even_ticks(from: f64, to: f64, most: usize) -> Vec<f64> {
    let rough = (to - from) / most as f64;
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .iter()
        .map(|s| s * decade)
        .find(|s| *s >= rough)
        .unwrap_or(rough);
    whole(from / step, to / step)
        .iter()
        .map(|n| n * step)
        .collect()
}

fn draw_line(chart: &mut Plot<'_, '_>, line: &Line<'_>, marks: bool) -> Result<(), Error> {
    let points = line.points.iter().copied();
    let ink = colour(line.style);
    if line.style.published {
        chart
            .draw_series(DashedLineSeries::new(points, 6, 4, ink.stroke_width(2)))
            .map_err(failed)?;
    } else {
        chart
            .draw_series(LineSeries::new(points, ink.stroke_width(2)))
            .map_err(failed)?;
    }
    if marks && line.points.len() <= 30 && !line.style.published {
        chart
            .draw_series(line.points.iter().map(|p| Circle::new(*p, 3, ink.filled())))
            .map_err(failed)?;
    }
    Ok(())
}

/// Labels at the ends of the lines, pushed apart where they would cover each other.
fn label_ends(
    area: &Area<'_>,
    lines: &[Line<'_>],
    ends: &[(i32, i32)],
    x: i32,
) -> Result<(), Error> {
    let mut places: Vec<(usize, i32)> = ends.iter().enumerate().map(|(i, e)| (i, e.1)).collect();
    places.sort_by_key(|p| p.1);
    spread_out(&mut places, area.dim_in_pixel().1 as i32 - LINE);
    for (i, y) in places {
        let ink = colour(lines[i].style);
        area.draw(&PathElement::new(
            [(ends[i].0 + 2, ends[i].1), (x - 4, y)],
            ink.stroke_width(1),
        ))
        .map_err(failed)?;
        write(
            area,
            lines[i].style.label.as_str(),
            (x, y),
            &text_style(ink, HPos::Left, VPos::Center),
        )?;
    }
    Ok(())
}

/// Pushes places (sorted by height) at least a line apart, upwards again where the bottom is reached.
fn spread_out(places: &mut [(usize, i32)], bottom: i32) {
    for i in 1..places.len() {
        places[i].1 = places[i].1.max(places[i - 1].1 + LINE);
    }
    let mut limit = bottom;
    for place in places.iter_mut().rev() {
        place.1 = place.1.min(limit);
        limit = place.1 - LINE;
    }
}

/// The key above a narrow chart.
fn key(area: &Area<'_>, lines: &[Line<'_>]) -> Result<(), Error> {
    for (i, line) in lines.iter().enumerate() {
        let y = LINE * (i as i32 + 1) + LINE / 2;
        let ink = colour(line.style);
        let strokes: &[(i32, i32)] = if line.style.published {
            &[(50, 58), (62, 70)]
        } else {
            &[(50, 70)]
        };
        for (from, to) in strokes {
            area.draw(&PathElement::new(
                [(*from, y), (*to, y)],
                ink.stroke_width(3),
            ))
            .map_err(failed)?;
        }
        write(
            area,
            line.style.label.as_str(),
            (76, y),
            &text_style(INK, HPos::Left, VPos::Center),
        )?;
    }
    Ok(())
}

/// Height of one histogram of [`doublings`], its label included.
const RIDGE: i32 = 78;

/// Histograms one over the other; a column is a doubling, its height the share of all that fell into it.
fn doublings(
    area: &Area<'_>,
    unit: &str,
    rows: &[(Style, Vec<(u64, u64)>)],
    width: u32,
) -> Result<(), Error> {
    let filled = |row: &[(u64, u64)]| {
        row.iter()
            .filter(|(_, n)| *n > 0)
            .map(|r| r.0)
            .collect::<Vec<u64>>()
    };
    let borders: Vec<u64> = rows.iter().flat_map(|(_, row)| filled(row)).collect();
    let (low, high) = (
        borders.iter().min().copied().unwrap_or(0),
        borders.iter().max().copied().unwrap_or(1),
    );
    // Columns: [0,1) is column 0, [1,2) is 1, [2,4) is 2 …
    let column = |border: u64| {
        if border == 0 {
            0
        } else {
            1 + border.ilog2() as i32
        }
    };
    let columns = column(high) - column(low) + 1;
    let step = f64::from(width as i32 - 4) / f64::from(columns);
    let x = |c: i32| (f64::from(c) * step) as i32;
    let most = rows
        .iter()
        .flat_map(|(_, r)| r.iter().map(|b| b.1 as f64 / total(r)))
        .fold(0.0, f64::max);
    for (i, (style, row)) in rows.iter().enumerate() {
        let (top, base) = (i as i32 * RIDGE, (i as i32 + 1) * RIDGE - 4);
        let ink = colour(style);
        write(
            area,
            style.label.as_str(),
            (0, top + 4),
            &text_style(INK, HPos::Left, VPos::Top),
        )?;
        area.draw(&PathElement::new(
            [(0, base), (width as i32, base)],
            GRID.stroke_width(1),
        ))
        .map_err(failed)?;
        for (border, count) in row.iter().filter(|(_, n)| *n > 0) {
            let share = *count as f64 / total(row);
            let rise = (share / most * f64::from(RIDGE - LINE - 14)).max(1.0) as i32;
            let at = column(*border) - column(low);
            let corners = [(x(at) + 1, base - rise), (x(at + 1) - 2, base)];
            let fill = if style.published {
                ink.mix(0.25).filled()
            } else {
                ink.filled()
            };
            area.draw(&Rectangle::new(corners, fill)).map_err(failed)?;
            if style.published {
                area.draw(&Rectangle::new(corners, ink.stroke_width(1)))
                    .map_err(failed)?;
            }
        }
    }
    let bottom = rows.len() as i32 * RIDGE;
    for c in 0..columns {
        let border = if c + column(low) == 0 {
            0
        } else {
            1u64 << (c + column(low) - 1)
        };
        write(
            area,
            border.to_string(),
            (x(c), bottom),
            &text_style(MUTED, HPos::Left, VPos::Top),
        )?;
    }
    let note = format!("{unit}, to the next; height: share of requests");
    write(
        area,
        note,
        (0, bottom + LINE + 4),
        &text_style(MUTED, HPos::Left, VPos::Top),
    )
}

fn total(row: &[(u64, u64)]) -> f64 {
    row.iter().map(|r| r.1).sum::<u64>().max(1) as f64
}

/// Horizontal bars, each under its label; published ones hollow.
fn draw_bars(
    area: &Area<'_>,
    unit: &str,
    bars: &[Bar],
    log: bool,
    width: u32,
) -> Result<(), Error> {
    let ends = || {
        bars.iter()
            .flat_map(|b| [Some(b.value), b.range.map(|r| r.1)])
            .flatten()
    };
    let starts = || {
        bars.iter()
            .flat_map(|b| [Some(b.value), b.range.map(|r| r.0)])
            .flatten()
    };
    let most = ends().fold(f64::MIN, f64::max).max(1e-9);
    let least = if log {
        starts().fold(f64::MAX, f64::min).max(1e-9) / 2.0
    } else {
        0.0
    };
    let room = f64::from(width) - 84.0;
    let x = |v: f64| {
        let share = if log {
            (v.max(least) / least).ln() / (most / least).ln()
        } else {
            v / most
        };
        (share * room) as i32
    };
    for (i, bar) in bars.iter().enumerate() {
        let top = i as i32 * 40;
        let ink = colour(&bar.style);
        write(
            area,
            bar.style.label.as_str(),
            (0, top + 2),
            &text_style(INK, HPos::Left, VPos::Top),
        )?;
        let corners = [(0, top + LINE + 3), (x(bar.value).max(1), top + LINE + 15)];
        area.draw(&Rectangle::new(
            corners,
            if bar.style.published {
                ink.mix(0.25).filled()
            } else {
                ink.filled()
            },
        ))
        .map_err(failed)?;
        if bar.style.published {
            area.draw(&Rectangle::new(corners, ink.stroke_width(1)))
                .map_err(failed)?;
        }
        let mut end = x(bar.value);
        if let Some((low, high)) = bar.range.filter(|(low, high)| high > low) {
            let y = top + LINE + 9;
            area.draw(&PathElement::new(
                [(x(low), y), (x(high), y)],
                INK.stroke_width(1),
            ))
            .map_err(failed)?;
            for at in [low, high] {
                area.draw(&PathElement::new(
                    [(x(at), y - 3), (x(at), y + 3)],
                    INK.stroke_width(1),
                ))
                .map_err(failed)?;
            }
            end = end.max(x(high));
        }
        let label = format!("{} {unit}", number(bar.value));
        write(
            area,
            label,
            (end + 6, top + LINE + 9),
            &text_style(INK, HPos::Left, VPos::Center),
        )?;
    }
    let scale = match (log, bars.iter().any(|b| b.range.is_some_and(|r| r.1 > r.0))) {
        (true, true) => "logarithmic; whiskers: all rounds",
        (true, false) => "logarithmic",
        (false, true) => "whiskers: all rounds",
        (false, false) => "",
    };
    write(
        area,
        scale,
        (0, bars.len() as i32 * 40 + 6),
        &text_style(MUTED, HPos::Left, VPos::Top),
    )
}

/// Rows with their labels, as [`times`] places them.
type TimesRows = [(String, Vec<Option<Times>>)];

/// The places of the cells of [`times`].
struct Grid {
    /// Height of a row.
    row: i32,
    /// Left edge of the first column: beside the labels, or under them where there is no room.
    left: i32,
    /// Height above the cells, of the labels.
    above: i32,
    /// Width of a column, and of its longest bar.
    column: i32,
    bar: i32,
}

impl Grid {
    fn of(rows: &TimesRows, width: u32) -> Self {
        let labels = rows.iter().map(|(label, _)| width_of(label)).max();
        let columns = rows.iter().map(|(_, cells)| cells.len()).max();
        let narrow = width < 500;
        let left = if narrow { 0 } else { labels.unwrap_or(0) + 20 };
        let above = if narrow { LINE + 2 } else { 0 };
        let column = (width as i32 - left) / columns.unwrap_or(1).max(1) as i32;
        Self {
            row: above + LINE + 22,
            left,
            above,
            column,
            bar: column - 12,
        }
    }
}

/// A table as a drawing: each value, and a bar for how many times the best of its column it is.
fn times(
    area: &Area<'_>,
    heads: &[String],
    bad: f64,
    rows: &TimesRows,
    width: u32,
) -> Result<(), Error> {
    let grid = Grid::of(rows, width);
    let all = rows.iter().flat_map(|(_, cells)| cells.iter().flatten());
    let most = all.map(|cell| cell.times).fold(10.0, f64::max);
    // The best is a stub, so that it is seen.
    let length =
        |times: f64| 4 + ((times.max(1.0).ln() / most.ln()) * f64::from(grid.bar - 4)) as i32;
    let column = |at: usize| grid.left + grid.column * at as i32;
    for (at, head) in heads.iter().enumerate() {
        let style = text_style(MUTED, HPos::Left, VPos::Top);
        write(area, head.as_str(), (column(at), 2), &style)?;
    }
    for (nth, (label, cells)) in rows.iter().enumerate() {
        let top = LINE + 6 + grid.row * nth as i32;
        let style = text_style(INK, HPos::Left, VPos::Top);
        write(area, label.as_str(), (0, top + 2), &style)?;
        for (at, cell) in cells.iter().enumerate() {
            let (x, y) = (column(at), top + grid.above);
            times_cell(area, *cell, bad, (x, y), &length)?;
        }
    }
    Ok(())
}

/// A cell of [`times`]: the value over its bar, and the line from which on it is bad.
fn times_cell(
    area: &Area<'_>,
    cell: Option<Times>,
    bad: f64,
    (x, y): (i32, i32),
    length: &dyn Fn(f64) -> i32,
) -> Result<(), Error> {
    let Some(Times { value, times }) = cell else {
        let style = text_style(MUTED, HPos::Left, VPos::Top);
        return write(area, "–", (x, y + 2), &style);
    };
    let is_bad = times >= bad;
    let words = match times {
        t if is_bad => format!("{} ✗ {t:.0}×", number(value)),
        t if t <= 1.0 => format!("{} best", number(value)),
        t => format!("{}  {t:.1}×", number(value)),
    };
    let ink = if is_bad { BAD } else { PALETTE[4] };
    let style = text_style(if is_bad { BAD } else { INK }, HPos::Left, VPos::Top);
    write(area, words, (x, y + 2), &style)?;
    let (upper, lower) = (y + LINE + 3, y + LINE + 13);
    let bar = Rectangle::new([(x, upper), (x + length(times), lower)], ink.filled());
    area.draw(&bar).map_err(failed)?;
    let at = x + length(bad);
    let line = PathElement::new([(at, upper - 2), (at, lower + 2)], INK.stroke_width(1));
    area.draw(&line).map_err(failed)
}

/// Stacked shares, a row each, with lines where even shares would end.
fn shares(area: &Area<'_>, rows: &[(String, Vec<f64>)], width: u32) -> Result<(), Error> {
    let full = f64::from(width) - 2.0;
    for (i, (label, shares)) in rows.iter().enumerate() {
        let top = i as i32 * 46;
        write(
            area,
            label.as_str(),
            (0, top + 2),
            &text_style(INK, HPos::Left, VPos::Top),
        )?;
        let (upper, lower) = (top + LINE + 3, top + LINE + 21);
        let mut from = 0.0;
        for (worker, share) in shares.iter().enumerate() {
            let to = from + share * full;
            let ink = PALETTE[[1, 4, 3, 2, 5, 6, 0][worker % 7]];
            area.draw(&Rectangle::new(
                [(from as i32 + 1, upper), (to as i32, lower)],
                ink.filled(),
            ))
            .map_err(failed)?;
            if to - from > 40.0 {
                let middle = ((from + to) / 2.0) as i32;
                let style = text_style(PAPER, HPos::Center, VPos::Center);
                write(
                    area,
                    format!("{:.0} %", share * 100.0),
                    (middle, (upper + lower) / 2),
                    &style,
                )?;
            }
            from = to;
        }
        for part in 1..shares.len() {
            let at = (full * part as f64 / shares.len() as f64) as i32;
            area.draw(&PathElement::new(
                [(at, upper - 3), (at, lower + 3)],
                INK.stroke_width(1),
            ))
            .map_err(failed)?;
        }
    }
    let note = "a colour a worker; thin lines: even shares";
    write(
        area,
        note,
        (0, rows.len() as i32 * 46 + 4),
        &text_style(MUTED, HPos::Left, VPos::Top),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_never_cover_each_other() {
        let mut places: Vec<(usize, i32)> = [10, 12, 13, 300, 301, 302]
            .into_iter()
            .enumerate()
            .collect();
        spread_out(&mut places, 310);
        assert!(
            places.windows(2).all(|w| w[1].1 - w[0].1 >= LINE),
            "{places:?}"
        );
        assert!(places.iter().all(|p| p.1 <= 310));
    }

    #[test]
    fn ticks_are_round_and_not_too_many() {
        let shown = |ticks: Vec<f64>| {
            ticks
                .iter()
                .map(|t| number(10f64.powf(*t)))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            shown(log_ticks(1.95, 3.05, 5)),
            ["100", "200", "500", "1,000"]
        );
        assert_eq!(
            shown(log_ticks(1.5, 5.4, 8)),
            [
                "100", "300", "1,000", "3,000", "10,000", "30,000", "100,000"
            ]
        );
        assert_eq!(even_ticks(0.0, 210.0, 8), [0.0, 50.0, 100.0, 150.0, 200.0]);
    }

    #[test]
    fn curves_end_at_the_limit() {
        assert_eq!(
            clip(vec![(0.0, 0.0), (2.0, 2.0), (9.0, 9.0)], 3.0),
            [(0.0, 0.0), (2.0, 2.0), (3.0, 3.0)]
        );
    }

    #[test]
    fn every_kind_draws_at_both_widths_without_text_outside() {
        let distribution = Distribution {
            unit: "ms".into(),
            upper: vec![1.0, 2.0, 64.0],
            count: vec![900, 90, 10],
        };
        let time = |value, times| Some(Times { value, times });
        let kinds = [
            Kind::Percentiles {
                unit: "ms".into(),
                series: vec![(Style::ours("a", 0), distribution)],
            },
            Kind::Bars {
                unit: "ms".into(),
                bars: vec![Bar {
                    style: Style::published("b", 1),
                    value: 3.0,
                    range: Some((2.0, 4.0)),
                }],
                log: true,
            },
            Kind::Doublings {
                unit: "ms".into(),
                rows: vec![(Style::ours("e", 3), vec![(0, 1), (1, 5), (2, 90), (4, 3)])],
            },
            Kind::Times {
                heads: vec!["x, ms".into(), "y".into()],
                bad: 3.0,
                rows: vec![
                    ("f".into(), vec![time(366.0, 278.0), None]),
                    ("g".into(), vec![time(1.32, 1.0), time(0.0, 1.0)]),
                ],
            },
            Kind::Shares {
                rows: vec![("c".into(), vec![0.25; 4])],
            },
            Kind::Lines {
                x: "n".into(),
                y: "us".into(),
                log: true,
                series: vec![(Style::ours("d", 2), vec![(100.0, 1.0), (1000.0, 30.0)])],
            },
        ];
        for kind in &kinds {
            for width in [WIDE, NARROW] {
                let svg = draw(kind, width).unwrap();
                assert!(svg.starts_with("<svg viewBox"), "{}", &svg[..60]);
                for x in svg.split("<text x=\"").skip(1) {
                    let x: i32 = x.split('"').next().unwrap().parse().unwrap();
                    assert!(
                        (0..=width as i32).contains(&x),
                        "{x} of {width} in {kind:?}"
                    );
                }
            }
        }
    }
}
