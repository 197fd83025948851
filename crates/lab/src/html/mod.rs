//! One self-contained page: no script, no network, light and dark, for screen, phone and paper.

mod chart;
mod page;

pub use page::{first_chart, page, report};
