//! The page around tables and charts.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::chart;
use crate::card::Card;
use crate::error::Error;
use crate::experiment::Experiment;
use crate::experiments;
use crate::present::{Block, Histogram, Table, number};
use crate::result::{Expectation, Outcome};
use crate::text;

/// Style of the page: colours of charts are attributes in the SVG and are exchanged here for the dark scheme.
const STYLE: &str = include_str!("style.css");

/// A page for one result.
///
/// # Errors
/// When a chart cannot be drawn.
pub fn page(experiment: &dyn Experiment, outcome: &Outcome) -> Result<String, Error> {
    let title = format!("{} · Wakeone lab", experiment.card().title);
    Ok(shell(
        &title,
        &html! {},
        &section(experiment, outcome, true)?,
    ))
}

/// A page for many results; those of experiments that this version does not know are shown by their numbers alone.
///
/// # Errors
/// When a chart cannot be drawn.
pub fn report(outcomes: &[Outcome]) -> Result<String, Error> {
    let sections = outcomes
        .iter()
        .map(|outcome| match experiments::find(&outcome.experiment) {
            Ok(known) => section(known, outcome, false),
            Err(_) => Ok(unknown(outcome)),
        })
        .collect::<Result<Vec<Markup>, Error>>()?;
    let (all, holding) = outcomes
        .iter()
        .flat_map(|o| &o.expectations)
        .fold((0, 0), |(n, h), e| (n + 1, h + usize::from(e.holds)));
    let top = html! {
        header.top {
            p.kicker { "Wakeone lab" }
            h1 { "The published experiments, measured here" }
            p.question { "Each connection wakes one worker: which one, how late, and at what price. Published figures beside ours." }
            p { (outcomes.len()) @if outcomes.len() == 1 { " experiment; " } @else { " experiments; " } strong { (holding) " of " (all) } " expectations hold." }
        }
        nav {
            ol {
                @for outcome in outcomes {
                    @let failing = outcome.expectations.iter().filter(|e| !e.holds).count();
                    li {
                        a href={ "#" (outcome.experiment) } { (title_of(outcome)) }
                        " "
                        span.verdict.fails[failing > 0] { (verdict(&outcome.expectations)) }
                    }
                }
            }
        }
    };
    Ok(shell(
        "Wakeone lab report",
        &top,
        &html! { @for s in &sections { (s) } },
    ))
}

/// The first chart of a result as an SVG file.
///
/// # Errors
/// When the experiment is not known, has no chart, or it cannot be drawn.
pub fn first_chart(outcome: &Outcome) -> Result<String, Error> {
    let blocks = experiments::find(&outcome.experiment)?.present(outcome);
    let shown = blocks.iter().find_map(|block| match block {
        Block::Chart(shown) => Some(shown),
        _ => None,
    });
    let none = || Error::Chart(format!("{} shows no chart", outcome.experiment));
    chart::file(&shown.ok_or_else(none)?.kind)
}

fn title_of(outcome: &Outcome) -> String {
    experiments::find(&outcome.experiment).map_or_else(
        |_| outcome.experiment.clone(),
        |e| e.card().title.to_owned(),
    )
}

fn verdict(expectations: &[Expectation]) -> String {
    let holding = expectations.iter().filter(|e| e.holds).count();
    format!("{holding} of {} hold", expectations.len())
}

fn shell(title: &str, top: &Markup, body: &Markup) -> String {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                // An empty icon: a browser would ask the server for one otherwise.
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) }
            }
            body { (top) main { (body) } }
        }
    }
    .into_string()
}

fn section(experiment: &dyn Experiment, outcome: &Outcome, alone: bool) -> Result<Markup, Error> {
    let card = experiment.card();
    let blocks = experiment
        .present(outcome)
        .iter()
        .map(block)
        .collect::<Result<Vec<Markup>, Error>>()?;
    Ok(html! {
        section #(card.name) {
            p.kicker { "wakeone-lab run " (card.name) }
            @if alone { h1 { (card.title) } } @else { h2.title { (card.title) } }
            p.question { (card.question) }
            (cite(card))
            @if !outcome.environment.warnings.is_empty() {
                div.warning {
                    strong { "Noisy." }
                    @for warning in &outcome.environment.warnings { p { (warning) } }
                }
            }
            @for block in &blocks { (block) }
            (closing(outcome))
        }
    })
}

fn cite(card: &Card) -> Markup {
    html! {
        p.cite {
            "Source: "
            @if card.source.url.is_empty() { (card.source.long) } @else { a href=(card.source.url) { (card.source.long) } }
        }
    }
}

fn block(block: &Block) -> Result<Markup, Error> {
    Ok(match block {
        Block::Heading(line) => html! { h3 { (line) } },
        Block::Paragraph(words) => html! { p { (words) } },
        Block::Table(shown) => table(shown),
        Block::Histograms(all) => histograms(all),
        Block::Chart(shown) => {
            let (wide, narrow) = (
                chart::draw(&shown.kind, chart::WIDE)?,
                chart::draw(&shown.kind, chart::NARROW)?,
            );
            html! {
                figure {
                    figcaption { strong { (shown.title) } " " (shown.note) }
                    div.wide role="img" aria-label=(shown.title) { (PreEscaped(wide)) }
                    div.narrow aria-hidden="true" { (PreEscaped(narrow)) }
                }
            }
        }
    })
}

fn table(shown: &Table) -> Markup {
    html! {
        p.caption { (shown.caption) }
        div.scroll.wide-table[shown.head.len() > 4] {
            table aria-label=(shown.caption) {
                thead { tr { @for cell in &shown.head { th scope="col" { (cell) } } } }
                tbody {
                    @for row in &shown.rows {
                        tr.published[row.published] {
                            @for (column, cell) in row.cells.iter().enumerate() {
                                @if column == 0 { th scope="row" { (cell) } }
                                @else if row.bad.contains(&column) { td.bad { (cell) " ✗" } }
                                @else { td { (cell) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn histograms(all: &[Histogram]) -> Markup {
    html! {
        details {
            summary { "Histograms in powers of two, as the source prints them" }
            div.histograms {
                @for shown in all {
                    div.scroll { pre.published[shown.published] { (text::histogram(shown).join("\n")) } }
                }
            }
        }
    }
}

fn closing(outcome: &Outcome) -> Markup {
    html! {
        @if !outcome.expectations.is_empty() {
            h3 { "Expectations: " (verdict(&outcome.expectations)) }
            ul.expectations {
                @for e in &outcome.expectations {
                    li.fails[!e.holds] {
                        span.mark { @if e.holds { "holds" } @else { "fails" } }
                        div {
                            (e.claim) ": "
                            strong { @match e.measured { Some(m) => { (number(m)) }, None => { "not measured" } } }
                            " " span.source { (e.source) }
                        }
                    }
                }
            }
        }
        @if !outcome.contrasts.is_empty() { (contrasts(outcome)) }
        @if !outcome.comparisons.is_empty() { (comparisons(outcome)) }
        (environment(outcome))
    }
}

fn contrasts(outcome: &Outcome) -> Markup {
    html! {
        details {
            summary { "Ratios of neighbouring slices" }
            div.scroll.wide-table {
                table {
                    thead { tr {
                        th scope="col" { "variant" } th scope="col" { "ratio" } th scope="col" { "middle half's mean" }
                        th scope="col" { "95 % interval" } th scope="col" { "slices" } th scope="col" { "each round" }
                    } }
                    tbody {
                        @for c in &outcome.contrasts {
                            tr {
                                th scope="row" { (c.variant) }
                                td { (c.a) " / " (c.b) ", " (c.per.name()) }
                                td { (format!("{:.3}", c.ratio)) }
                                td { (format!("{:.3} to {:.3}", c.low, c.high)) }
                                td { (c.slices) }
                                td { (c.rounds.iter().map(|r| format!("{r:.3}")).collect::<Vec<_>>().join("  ")) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn comparisons(outcome: &Outcome) -> Markup {
    html! {
        details {
            summary { "Ratios, paired by round" }
            div.scroll {
                table {
                    thead { tr { th scope="col" { "ratio" } th scope="col" { "median" } th scope="col" { "each round" } } }
                    tbody {
                        @for c in &outcome.comparisons {
                            tr {
                                th scope="row" { (c.name) }
                                td { (number(c.median)) }
                                td { (c.ratios.iter().map(|r| number(*r)).collect::<Vec<_>>().join("  ")) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn environment(outcome: &Outcome) -> Markup {
    let e = &outcome.environment;
    let flag = |on: bool, text: String| if on { text } else { String::new() };
    let quick = outcome
        .parameters
        .get("quick")
        .and_then(serde_json::Value::as_bool)
        .unwrap_or(false);
    let again = format!(
        "wakeone-lab run {}{}{}{}",
        outcome.experiment,
        flag(quick, " --quick".into()),
        flag(
            true,
            format!(" --rounds {}", outcome.parameter_u64("rounds").unwrap_or(1))
        ),
        outcome
            .parameter_u64("seed")
            .map_or_else(String::new, |s| format!(" --seed {s}"))
    );
    html! {
        details {
            summary { "Where, when and how it was measured" }
            dl {
                dt { "Again" } dd { code { (again) } }
                dt { "Machine" } dd { "Linux " (e.kernel) " (" (e.arch) "), " (e.cpus) " × " (e.cpu_model) ", " (format!("{:.1} GiB", e.memory_bytes as f64 / f64::from(1u32 << 30))) }
                dt { "Quiet?" } dd { (format!("{:.0} % of the CPU time in use before, load {:.2} before, {:.2} after; {:.1} % of the CPU time stolen", e.busy_before * 100.0, e.load_before, e.load_after, e.steal_share * 100.0)) }
                dt { "When" } dd { (e.started) (format!(", {:.0} s", e.elapsed_s)) }
                dt { "Version" } dd { (outcome.version) " (" (outcome.commit) ")" }
                @for (name, value) in &outcome.parameters {
                    dt { (name) } dd { (match value { serde_json::Value::String(s) => s.clone(), other => other.to_string() }) }
                }
            }
        }
    }
}

/// A result of an experiment that this version does not have: its medians, so that nothing is hidden.
fn unknown(outcome: &Outcome) -> Markup {
    html! {
        section #(outcome.experiment) {
            h2.title { (outcome.experiment) }
            p { "This version does not know the experiment; these are its medians." }
            @for variant in &outcome.variants {
                h3 { (variant.name) }
                dl { @for (name, metric) in &variant.metrics { dt { (name) } dd { (number(metric.median)) " " (metric.unit) } } }
            }
            (closing(outcome))
        }
    }
}
