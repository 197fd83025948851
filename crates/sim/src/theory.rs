//! Closed forms of queueing theory for the same servers. The simulator is checked against them.

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

/// Returns the time in s within which the share `quantile` of requests to an M/M/c ends, with exponential service of
/// mean `service_s`. The wait is 0 or exponential, and the service comes on top.
pub fn mmc_quantile_s(servers: usize, per_s: f64, service_s: f64, quantile: f64) -> f64 {
    let waits = erlang_c(servers, per_s * service_s);
    let (end, work) = (servers as f64 / service_s - per_s, 1.0 / service_s);
    let later = |time: f64| {
        let alone = (-work * time).exp();
        if (end - work).abs() < 1e-9 * work {
            return alone + waits * work * time * alone;
        }
        let both = (work * (-end * time).exp() - end * alone) / (work - end);
        (1.0 - waits) * alone + waits * both
    };
    let (mut low, mut high) = (0.0, service_s);
    while later(high) > 1.0 - quantile {
        high *= 2.0;
    }
    for _ in 0..100 {
        let middle = (low + high) / 2.0;
        if later(middle) > 1.0 - quantile {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

/// The highest load, of 1, at which the share `quantile` of requests to an M/M/c takes at most `times` its mean service.
pub fn mmc_highest_load(servers: usize, quantile: f64, times: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let load = (low + high) / 2.0;
        if mmc_quantile_s(servers, load * servers as f64, 1.0, quantile) <= times {
            low = load;
        } else {
            high = load;
        }
    }
    low
}

/// Lengths of a queue that are told apart by [`shortest_of_two_mean_s`].
const LONGEST: usize = 160;
/// The two never differ by more than this: the chance falls by a factor of three or more with each.
const APART: usize = 25;

/// Mean time where each request joins the shorter of two queues. Service is exponential with mean `service_s`, and
/// Poisson arrivals bring `load` of both servers' time, below 0.95. There is no closed form: the equations of balance
/// are iterated until they hold.
pub fn shortest_of_two_mean_s(load: f64, service_s: f64) -> f64 {
    let arrive = 2.0 * load;
    let mut share = vec![[0.0; LONGEST]; LONGEST];
    // Starts near the result: the number decreases like that of one queue, and the difference quickly.
    for (long, row) in share.iter_mut().enumerate() {
        for (short, one) in row
            .iter_mut()
            .enumerate()
            .take(long + 1)
            .skip(long.saturating_sub(APART))
        {
            *one = load.powi((long + short) as i32) * 0.3_f64.powi((long - short) as i32);
        }
    }
    let mut before = 0.0;
    loop {
        for _ in 0..50 {
            balance(&mut share, arrive);
        }
        let number = normalize(&mut share);
        if (number / before - 1.0).abs() < 1e-6 {
            return number / arrive * service_s;
        }
        before = number;
    }
}

/// One sweep over the equations of balance; rows are the longer queue, columns the shorter one.
fn balance(share: &mut [[f64; LONGEST]], arrive: f64) {
    for long in 0..LONGEST - 1 {
        for short in long.saturating_sub(APART)..=long {
            let mut enter = 0.0;
            // An arrival made the shorter one longer: both were equal, or it was the shorter one.
            if long > 0 && short == long - 1 {
                enter += arrive * share[short][short];
            }
            if short > 0 {
                enter += arrive * share[long][short - 1];
            }
            // A request ended in the longer one, or in the shorter one, which may have been as long.
            enter += share[long + 1][short];
            if short < long {
                let ends = if short + 1 == long { 2.0 } else { 1.0 };
                enter += ends * share[long][short + 1];
            }
            let leave = arrive + f64::from(u8::from(long > 0)) + f64::from(u8::from(short > 0));
            share[long][short] = enter / leave;
        }
    }
}

/// Makes the shares one in all; returns the mean number of requests.
fn normalize(share: &mut [[f64; LONGEST]]) -> f64 {
    let total: f64 = share.iter().flatten().sum();
    let mut number = 0.0;
    for (long, row) in share.iter_mut().enumerate() {
        for (short, one) in row.iter_mut().enumerate() {
            *one /= total;
            number += (long + short) as f64 * *one;
        }
    }
    number
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

    #[test]
    fn the_highest_loads_are_those_that_are_known() {
        // Of one server by hand: ln 100 / (1 - load) = 10.
        near(mmc_quantile_s(1, 0.5, 1.0, 0.99), 100_f64.ln() * 2.0, 1e-9);
        near(
            mmc_highest_load(1, 0.99, 10.0),
            1.0 - 100_f64.ln() / 10.0,
            1e-9,
        );
        for (servers, load) in [(1, 0.539), (4, 0.875), (16, 0.968)] {
            near(mmc_highest_load(servers, 0.99, 10.0), load, 1e-3);
        }
    }

    #[test]
    fn the_shorter_of_two_queues_lies_between_one_queue_and_chance() {
        for load in [0.3, 0.7, 0.9] {
            let shorter = shortest_of_two_mean_s(load, 1.0);
            let one = mmc_mean_s(2, 2.0 * load, 1.0);
            assert!(
                one < shorter && shorter < mmc_mean_s(1, load, 1.0),
                "{load}: {shorter}"
            );
            // Halfin (1985): it has less than one request more than one queue.
            assert!((shorter - one) * 2.0 * load < 1.0, "{load}");
        }
    }
}
