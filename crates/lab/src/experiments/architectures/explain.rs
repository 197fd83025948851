//! Which failed requests are the architecture's own nature, and which are a fault.

/// The counts of one point, from which its failures are explained.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    /// Simultaneous clients.
    pub clients: f64,
    /// How long each of them waits for an answer, in s.
    pub patience_s: f64,
    /// Answers a second of the same architecture where the fewest clients were.
    pub unhurried_per_s: f64,
    /// How many connections its accept queues have room for.
    pub places: f64,
    /// How often the kernel found an accept queue full during the point.
    pub overflows: f64,
    /// Requests not answered in time, the handshake included.
    pub timeouts: f64,
    /// Connections reset before the answer was whole.
    pub resets: f64,
    /// Failures of any other kind.
    pub others: f64,
}

/// How many failures the model does not explain.
///
/// Two kinds it does explain:
///
/// * Timeouts, where the architecture could not answer so many clients in time even at the rate that it has with few
///   of them: `clients / unhurried rate > patience`. This does not excuse a server that hangs, for its unhurried rate was
///   measured at another point.
/// * Resets, where more clients come at once than the accept queues have room for, and the kernel counted at least as many
///   overflows. With a full queue the kernel forgets the handshake of a client that takes itself for connected. It answers
///   that client's data with a reset.
///
/// Other failures are faults under every architecture: a refused connection, an answer cut short, a wrong answer or status,
/// and a lack of descriptors.
pub fn unexplained(point: &Point) -> f64 {
    let too_many = point.clients / point.unhurried_per_s > point.patience_s;
    let crowded = point.clients > point.places && point.overflows >= point.resets;
    let timeouts = if too_many { 0.0 } else { point.timeouts };
    let resets = if crowded { 0.0 } else { point.resets };
    timeouts + resets + point.others
}

/// Returns the difference between the server's count and the client's, beyond the `uncertain` requests. Those failed for
/// the client, or were under way at the end, so the server may or may not have counted them.
pub fn counted_apart(server: f64, answered: f64, uncertain: f64) -> f64 {
    let lost = (answered - server).max(0.0);
    let made_up = (server - answered - uncertain).max(0.0);
    lost + made_up
}

#[cfg(test)]
mod tests {
    use super::*;

    const FINE: Point = Point {
        clients: 5000.0,
        patience_s: 10.0,
        unhurried_per_s: 8000.0,
        places: 4097.0,
        overflows: 0.0,
        timeouts: 0.0,
        resets: 0.0,
        others: 0.0,
    };

    #[test]
    fn timeouts_are_explained_only_by_a_rate_that_was_too_low_with_few_clients() {
        let hung = Point {
            timeouts: 5000.0,
            ..FINE
        };
        assert_eq!(unexplained(&hung), 5000.0);
        let slow = Point {
            unhurried_per_s: 7.0,
            ..hung
        };
        assert_eq!(unexplained(&slow), 0.0);
        let never_measured = Point {
            unhurried_per_s: f64::NAN,
            ..hung
        };
        assert_eq!(unexplained(&never_measured), 5000.0);
    }

    #[test]
    fn resets_are_explained_only_by_queues_that_overflowed() {
        let reset = Point {
            resets: 2.0,
            ..FINE
        };
        assert_eq!(unexplained(&reset), 2.0);
        let one_short = Point {
            overflows: 1.0,
            ..reset
        };
        assert_eq!(unexplained(&one_short), 2.0);
        let overflowed = Point {
            overflows: 2.0,
            ..reset
        };
        assert_eq!(unexplained(&overflowed), 0.0);
        let few = Point {
            clients: 20.0,
            ..overflowed
        };
        assert_eq!(unexplained(&few), 2.0);
    }

    #[test]
    fn nothing_explains_the_rest() {
        let wrong = Point {
            others: 1.0,
            unhurried_per_s: 7.0,
            overflows: 9.0,
            ..FINE
        };
        assert_eq!(unexplained(&wrong), 1.0);
    }

    #[test]
    fn counts_agree_up_to_what_nobody_can_know() {
        assert_eq!(counted_apart(100.0, 100.0, 0.0), 0.0);
        assert_eq!(counted_apart(103.0, 100.0, 3.0), 0.0);
        assert_eq!(counted_apart(104.0, 100.0, 3.0), 1.0);
        assert_eq!(counted_apart(99.0, 100.0, 3.0), 1.0);
    }
}
