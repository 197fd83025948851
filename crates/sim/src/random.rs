//! Random numbers: one seed gives one result, to the byte.

use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Exp1};
use rand_xoshiro::Xoshiro256PlusPlus;

#[inline]
pub(crate) fn exponential(random: &mut impl Rng) -> f64 {
    Exp1.sample(random)
}

/// A stream of random numbers of its own for each use: two ways of handing out the same load then see the same load.
pub(crate) fn stream(seed: u64, of: u64) -> Xoshiro256PlusPlus {
    Xoshiro256PlusPlus::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ of)
}
