//! The published experiments of this field, measured here beside their numbers.
