//! The words of an experiment, read from the `card.toml` of its folder: its name, its expectations, its sentences.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use crate::result::{Expectation, Outcome};
use crate::template;

/// The publication behind an experiment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Source {
    /// Short, as cited beside a number: `Molloy and Lever, 2000`.
    pub short: String,
    /// Author, title, place, date.
    pub long: String,
    /// Address, empty where there is none.
    #[serde(default)]
    pub url: String,
}

/// The part of an experiment that does not depend on the run.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// Name on the command line and in results.
    pub name: String,
    /// A headline.
    pub title: String,
    /// The question, in one sentence.
    pub question: String,
    /// The source of the question.
    pub source: Source,
    /// The expectations, by name: a bound, a claim, and its source. Without a source it is [`OWN_GOAL`].
    #[serde(default)]
    expect: BTreeMap<String, Vec<String>>,
    /// Sentences with names in braces, by what they are about.
    #[serde(default)]
    pub words: BTreeMap<String, String>,
    /// The loads and the servers of an experiment that is its card; see [`crate::trials`].
    #[serde(default)]
    pub trials: toml::Table,
    /// The folder's README: method, published data, expectations.
    #[serde(skip)]
    pub readme: &'static str,
    /// The folder's CSV of published figures.
    #[serde(skip)]
    pub published: &'static str,
}

/// The source of a claim that nobody published.
pub const OWN_GOAL: &str = "Wakeone's own goal";

/// Names and what they stand for.
pub type Names<'a> = [(&'a str, &'a str)];

/// The limit of a number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// It, or less.
    AtMost(f64),
    /// It, or more.
    AtLeast(f64),
    /// Less.
    Below(f64),
    /// More.
    Above(f64),
    /// It.
    Is(f64),
    /// From the one to the other.
    Within(f64, f64),
}

impl Bound {
    /// `<= 1.3`, `>= 3`, `< 1`, `> 0`, `= 0` or `0.8..1.25`, both ends included.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some((low, high)) = text.split_once("..") {
            return Some(Self::Within(low.parse().ok()?, high.parse().ok()?));
        }
        let (sign, limit) = text.split_once(' ')?;
        let limit = limit.parse().ok()?;
        Some(match sign {
            "<=" => Self::AtMost(limit),
            ">=" => Self::AtLeast(limit),
            "<" => Self::Below(limit),
            ">" => Self::Above(limit),
            "=" => Self::Is(limit),
            _ => return None,
        })
    }

    /// How far a value is from where it should be; more is worse.
    fn badness(self, value: f64) -> f64 {
        match self {
            Self::AtMost(_) | Self::Below(_) => value,
            Self::AtLeast(_) | Self::Above(_) => -value,
            Self::Is(limit) => (value - limit).abs(),
            Self::Within(low, high) => (value - low.midpoint(high)).abs(),
        }
    }

    /// A value that holds, and one near it that does not.
    #[cfg(test)]
    fn around(self) -> (f64, f64) {
        match self {
            Self::AtMost(limit) => (limit, limit * 1.01 + 1e-3),
            Self::AtLeast(limit) => (limit, limit * 0.99 - 1e-3),
            Self::Below(limit) => (limit * 0.99, limit),
            Self::Above(limit) => (limit + 1.0, limit),
            Self::Is(limit) => (limit, limit + 1.0),
            Self::Within(_, high) => (high, high * 1.01),
        }
    }

    /// Whether a number is within it.
    pub fn holds(self, value: f64) -> bool {
        match self {
            Self::AtMost(limit) => value <= limit,
            Self::AtLeast(limit) => value >= limit,
            Self::Below(limit) => value < limit,
            Self::Above(limit) => value > limit,
            Self::Is(limit) => value == limit,
            Self::Within(low, high) => (low..=high).contains(&value),
        }
    }
}

impl Card {
    /// Reads a card.
    ///
    /// # Panics
    /// When the text is no card: it is compiled in, and a test reads each.
    pub fn read(text: &str, readme: &'static str, published: &'static str) -> Self {
        let card: Self =
            toml::from_str(text).unwrap_or_else(|e| panic!("a card.toml is none: {e}"));
        for (name, parts) in &card.expect {
            let bound = parts.first().filter(|_| (2..=3).contains(&parts.len()));
            let given = |text: &String| text.contains('{') || Bound::parse(text).is_some();
            assert!(bound.is_some_and(given), "{}: {name}", card.name);
        }
        Self {
            readme,
            published,
            ..card
        }
    }

    /// An expectation of the card, held against a number.
    ///
    /// # Panics
    /// As [`Card::expect_of`].
    pub fn expect(&self, name: &str, measured: Option<f64>) -> Expectation {
        self.expect_of(name, &[], measured)
    }

    /// The same for an expectation whose name, bound, claim or source has names in braces.
    ///
    /// # Panics
    /// When the card has none of this name, or it has no bound. The tests of each experiment judge, and so find that.
    pub fn expect_of(&self, name: &str, names: &Names<'_>, measured: Option<f64>) -> Expectation {
        let [claim, source] = [1, 2].map(|at| self.part(name, at, names));
        Expectation::new(
            template::fill(name, names.iter().copied()),
            claim.unwrap_or_default(),
            source.unwrap_or_else(|| OWN_GOAL.into()),
            measured,
            |value| self.bound(name, names).holds(value),
        )
    }

    /// The number that is worst by the bound of an expectation.
    ///
    /// # Panics
    /// As [`Card::expect_of`].
    pub fn worst_of(&self, name: &str, names: &Names<'_>, all: &[f64]) -> Option<f64> {
        let bound = self.bound(name, names);
        let all = all.iter().copied();
        all.max_by(|a, b| bound.badness(*a).total_cmp(&bound.badness(*b)))
    }

    /// A number that an expectation holds for, and one that it does not.
    #[cfg(test)]
    pub fn around_bound(&self, name: &str, names: &Names<'_>) -> (f64, f64) {
        self.bound(name, names).around()
    }

    /// Whether a number is within the bound of an expectation.
    ///
    /// # Panics
    /// As [`Card::expect_of`].
    pub fn holds(&self, name: &str, value: f64) -> bool {
        self.bound(name, &[]).holds(value)
    }

    fn bound(&self, name: &str, names: &Names<'_>) -> Bound {
        let text = self.part(name, 0, names).unwrap_or_default();
        Bound::parse(&text).unwrap_or_else(|| panic!("{}: {name}: no bound: {text}", self.name))
    }

    fn part(&self, name: &str, at: usize, names: &Names<'_>) -> Option<String> {
        let parts = self.expect.get(name);
        let parts = parts.unwrap_or_else(|| panic!("{} does not expect {name}", self.name));
        let text = parts.get(at)?;
        Some(template::fill(text, names.iter().copied()))
    }

    /// A sentence of the card with these names and the numbers of a result in it; see [`template::numbers`]. None where one was
    /// not measured.
    ///
    /// # Panics
    /// When the card has none of this name.
    pub fn say(&self, name: &str, outcome: &Outcome, names: &Names<'_>) -> Option<String> {
        let text = self.words.get(name);
        let text = text.unwrap_or_else(|| panic!("{} says nothing of {name}", self.name));
        template::numbers(&template::fill(text, names.iter().copied()), outcome)
    }
}

/// `CARD`, from the `card.toml` and the `README.md` beside the file, and with `published` from its `published.csv`.
macro_rules! card {
    () => {
        crate::card::card!(@ "series,x,metric,unit,value,note\n");
    };
    (published) => {
        crate::card::card!(@ include_str!("published.csv"));
    };
    (@ $published:expr) => {
        /// The words of the experiment.
        static CARD: std::sync::LazyLock<crate::card::Card> = std::sync::LazyLock::new(|| {
            crate::card::Card::read(include_str!("card.toml"), include_str!("README.md"), $published)
        });
    };
}
pub(crate) use card;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::outcome;

    const TEXT: &str = r#"
name = "n"
title = "t"
question = "q"
source = { short = "s", long = "l" }

[expect]
"{who}-fast" = ["<= {most}", "{who}: at most {most}", "them"]
even = ["0.8..1.25", "even"]

[words]
all = "{who} takes {x/{who} ms} ms."
"#;

    #[test]
    fn names_are_filled_in_everywhere() {
        let card = Card::read(TEXT, "", "");
        let names = [("who", "nginx"), ("most", "1.5")];
        let found = card.expect_of("{who}-fast", &names, Some(1.5));
        let told = (&*found.name, &*found.claim, &*found.source, found.holds);
        assert_eq!(told, ("nginx-fast", "nginx: at most 1.5", "them", true));
        assert!(!card.expect_of("{who}-fast", &names, Some(1.51)).holds);
        assert!(!card.expect_of("{who}-fast", &names, None).holds);
        assert_eq!(card.expect("even", None).source, OWN_GOAL);
        let result = outcome(&[("x/nginx", &[("ms", &[2.5])])]);
        let said = card.say("all", &result, &names);
        assert_eq!(said.as_deref(), Some("nginx takes 2.50 ms."));
        assert_eq!(card.say("all", &outcome(&[]), &names), None);
    }

    #[test]
    fn bounds_hold_up_to_their_ends() {
        let holding = |text: &str| {
            let bound = Bound::parse(text).unwrap();
            [0.9, 1.0, 1.1].map(|value| bound.holds(value))
        };
        assert_eq!(holding("<= 1"), [true, true, false]);
        assert_eq!(holding(">= 1"), [false, true, true]);
        assert_eq!(holding("< 1"), [true, false, false]);
        assert_eq!(holding("> 1"), [false, false, true]);
        assert_eq!(holding("= 1"), [false, true, false]);
        assert_eq!(holding("0.95..1"), [false, true, false]);
        assert_eq!(holding("1..1.1"), [false, true, true]);
        for none in ["", "1", "<=1", "=> 1", "<= x", "1.."] {
            assert_eq!(Bound::parse(none), None, "{none}");
        }
    }
}
