//! Values that `--quick` makes smaller.

use serde::{Deserialize, Serialize};

/// A value with `--quick`, and without; or one for both.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Sizes<T> {
    /// One for both.
    Same(T),
    /// The smaller one, and the whole.
    Both(T, T),
}

impl<T: Copy> Sizes<T> {
    /// The value.
    pub fn of(self, quick: bool) -> T {
        match self {
            Sizes::Same(value) => value,
            Sizes::Both(small, whole) => {
                if quick {
                    small
                } else {
                    whole
                }
            }
        }
    }
}
