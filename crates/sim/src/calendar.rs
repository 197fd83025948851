//! The next of a fixed number of moments.

/// With so many leaves the whole way up takes less time than a wrong guess of the branch that ends it early.
const SMALL: usize = 16;

/// A moment for each of a fixed number of places; infinity where nothing is due.
///
/// It is a tournament tree: a change goes up from its leaf. In a large tree it stops where it changes nothing. Nothing is
/// allocated, and the moments of 1,024 places with all inner nodes are 16 KiB.
#[derive(Debug)]
pub(crate) struct Calendar {
    /// The leaves begin here.
    leaves: usize,
    /// Node n has the earlier moment of nodes 2n and 2n + 1.
    tree: Vec<f64>,
}

impl Calendar {
    pub(crate) fn new(places: usize) -> Self {
        let leaves = places.next_power_of_two();
        Self {
            leaves,
            tree: vec![f64::INFINITY; 2 * leaves],
        }
    }

    /// The next moment.
    #[inline]
    pub(crate) fn next(&self) -> f64 {
        self.tree[1]
    }

    /// The moment of a place.
    pub(crate) fn get(&self, place: usize) -> f64 {
        self.tree[self.leaves + place]
    }

    /// The place of the next moment; any where nothing is due.
    #[inline]
    pub(crate) fn place(&self) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            node += usize::from(self.tree[node] > self.tree[node + 1]);
        }
        node - self.leaves
    }

    #[inline]
    pub(crate) fn set(&mut self, place: usize, moment: f64) {
        let mut node = self.leaves + place;
        self.tree[node] = moment;
        while node > 1 {
            node /= 2;
            let (left, right) = (self.tree[2 * node], self.tree[2 * node + 1]);
            let first = if left <= right { left } else { right };
            if self.leaves > SMALL && self.tree[node] == first {
                return;
            }
            self.tree[node] = first;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_next_is_the_earliest(
            places in 1_usize..40,
            changes in prop::collection::vec((0_usize..40, prop::option::of(0_u8..50)), 0..200),
        ) {
            let mut calendar = Calendar::new(places);
            let mut all = vec![f64::INFINITY; places];
            for (place, moment) in changes {
                let (place, moment) = (place % places, moment.map_or(f64::INFINITY, f64::from));
                calendar.set(place, moment);
                all[place] = moment;
                let earliest = all.iter().copied().fold(f64::INFINITY, f64::min);
                prop_assert_eq!(calendar.next(), earliest);
                if earliest.is_finite() {
                    prop_assert_eq!(all[calendar.place()], earliest);
                }
                prop_assert_eq!(calendar.get(place), moment);
            }
        }
    }
}
