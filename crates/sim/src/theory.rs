//! Closed forms of queueing theory for the same servers. The simulator is held against them.

/// The probability that a request waits, with `servers` servers and Poisson arrivals that bring `offered` servers' work
/// (Erlang, 1917). From Erlang's B by recursion, which loses no digits.
pub fn erlang_c(servers: usize, offered: f64) -> f64 {
    let mut blocked = 1.0;
    for n in 1..=servers {
        blocked = offered * blocked / (n as f64 + offered * blocked);
    }
    let load = offered / servers as f64;
    blocked / (1.0 - load * (1.0 - blocked))
}

/// Mean time in an M/M/c: one queue, exponential service with mean `service_s`, in s.
pub fn mmc_mean_s(servers: usize, per_s: f64, service_s: f64) -> f64 {
    let offered = per_s * service_s;
    service_s + erlang_c(servers, offered) * service_s / (servers as f64 - offered)
}

/// Mean time in an M/G/1 (Pollaczek and Khinchine): Poisson arrivals of `per_s`, service with this mean and mean square.
pub fn mg1_mean_s(per_s: f64, service_s: f64, square_s2: f64) -> f64 {
    service_s + per_s * square_s2 / (2.0 * (1.0 - per_s * service_s))
}

/// Mean time in an M/G/c by the approximation of Lee and Longton (1959): the waiting time of the M/M/c, scaled by the
/// service's variation.
pub fn mgc_mean_s(servers: usize, per_s: f64, service_s: f64, square_s2: f64) -> f64 {
    let waits = mmc_mean_s(servers, per_s, service_s) - service_s;
    service_s + waits * square_s2 / (2.0 * service_s * service_s)
}

/// The part of the servers that have at least `length` requests, in the limit of many servers. Each request goes to the
/// shorter of two queues drawn by chance (Mitzenmacher, 1996).
pub fn two_choices_tail(load: f64, length: u32) -> f64 {
    load.powf(2_f64.powi(length as i32) - 1.0)
}

/// Mean time under two choices in that limit, exponential service with mean `service_s`: by Little's law.
pub fn two_choices_mean_s(load: f64, service_s: f64) -> f64 {
    let waiting: f64 = (1..=40).map(|i| two_choices_tail(load, i)).sum();
    waiting / load * service_s
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64, by: f64) {
        assert!((a / b - 1.0).abs() < by, "{a} is not {b}");
    }

    /// Values from tables and by hand.
    #[test]
    fn formulas_give_what_is_known() {
        // M/M/1: the load itself, and 1 / (mu - lambda).
        near(erlang_c(1, 0.7), 0.7, 1e-12);
        near(mmc_mean_s(1, 0.7, 1.0), 1.0 / 0.3, 1e-12);
        // Erlang C, 5 servers, 4 erlangs: 0.5541.
        near(erlang_c(5, 4.0), 0.5541, 1e-4);
        // Deterministic service halves the wait of an M/M/1.
        near(mg1_mean_s(0.7, 1.0, 1.0) - 1.0, 0.7 / 0.3 / 2.0, 1e-12);
        near(mg1_mean_s(0.7, 1.0, 2.0), mmc_mean_s(1, 0.7, 1.0), 1e-12);
        near(mgc_mean_s(4, 3.0, 1.0, 2.0), mmc_mean_s(4, 3.0, 1.0), 1e-12);
        near(two_choices_tail(0.9, 1), 0.9, 1e-12);
        near(two_choices_tail(0.5, 3), 0.5_f64.powi(7), 1e-12);
    }
}
