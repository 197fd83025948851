//! Decides whether doctor says what is so, by what the clients saw and by doctor's own figures.

/// Findings that are so whatever happens, of workers that share a socket and are all woken.
const HERDS: [&str; 2] = ["epoll-exclusive-missing", "thundering-herd"];
/// Findings that may be so in a situation.
const MAY_BE: [(&str, &[&str]); 4] = [
    ("well", &[]),
    (
        "hangs",
        &[
            "stuck-worker",
            "blind-hash",
            "workers-busy",
            "waits-inside",
            "long-waits",
            "lifo-imbalance",
            "group-of-one",
        ],
    ),
    (
        "overloaded",
        &[
            "workers-busy",
            "waits-inside",
            "cpu-missing",
            "blind-hash",
            "stuck-worker",
            "accept-queue-overflow",
            "backlog-too-small",
            "long-waits",
            "lifo-imbalance",
            "group-of-one",
        ],
    ),
    ("kept", &["lifo-imbalance", "group-of-one"]),
];
/// The findings of a worker that hangs.
const HANGING: [&str; 2] = ["stuck-worker", "blind-hash"];
/// A wait before accept() that is no health, ms.
const LONG_MS: f64 = 100.0;
/// A latency that only a hanging worker causes, ms.
const HANGS_MS: f64 = 1000.0;
/// A latency above twice what clients have of a worker with an even share of those of `kept`. Below, the worker that has most is
/// idle, and doctor only notes that.
const HURT_MS: f64 = 10.0;
/// The busiest worker's answers over an even share, from which on it is one that gets most.
const UNEVEN: f64 = 2.0;

/// A server in a situation, as it was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Truth {
    /// The 99th percentile of the waits before accept(), as doctor measured it, ms.
    pub wait_ms_p99: Option<f64>,
    /// The clients' 99th percentile, ms.
    pub latency_ms_p99: f64,
    /// The busiest worker's answers over the mean.
    pub busiest: f64,
    /// Whether the workers share one socket.
    pub shared: bool,
}

/// Tells what is wrong with what doctor found in a situation. `None`: nothing.
pub fn wrong(situation: &str, found: &[String], truth: &Truth) -> Option<String> {
    let may_be = MAY_BE.iter().find(|(name, _)| *name == situation);
    let may_be = may_be.map_or(&[][..], |(_, codes)| codes);
    let wait = truth.wait_ms_p99.unwrap_or(0.0);
    let waits = wait >= LONG_MS;
    let is_so = |code: &str| {
        may_be.contains(&code)
            || truth.shared && HERDS.contains(&code)
            // A worker that serves one connection at a time is busy as long as that is kept.
            || waits && code == "workers-busy"
    };
    if let Some(code) = found.iter().find(|code| !is_so(code)) {
        return Some(format!("{code} is not so"));
    }
    let has = |codes: &[&str]| found.iter().any(|code| codes.contains(&&**code));
    if found.is_empty() && waits {
        return Some(format!(
            "nothing was found, and 99 % wait up to {wait:.0} ms"
        ));
    }
    let latency = truth.latency_ms_p99;
    if situation == "hangs" && latency >= HANGS_MS && !truth.shared && !has(&HANGING) {
        return Some(format!(
            "the worker that hangs was not found, and 99 % take up to {latency:.0} ms"
        ));
    }
    let busiest = truth.busiest;
    let hurts = truth.shared && busiest >= UNEVEN && latency >= HURT_MS;
    if situation == "kept" && hurts && !has(&["lifo-imbalance"]) {
        return Some(format!(
            "one worker answered {busiest:.1} times its share, and that was not found"
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const WELL: Truth = Truth {
        wait_ms_p99: Some(1.0),
        latency_ms_p99: 5.0,
        busiest: 1.1,
        shared: false,
    };

    fn is_wrong(situation: &str, found: &[&str], truth: Truth) -> bool {
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        wrong(situation, &found, &truth).is_some()
    }

    #[test]
    fn what_is_not_so_is_wrong_and_what_is_not_said() {
        let shared = Truth {
            shared: true,
            ..WELL
        };
        assert!(!is_wrong("well", &[], WELL));
        assert!(is_wrong("well", &["stuck-worker"], WELL));
        assert!(is_wrong("well", &[HERDS[0]], WELL));
        assert!(!is_wrong("well", &[HERDS[0]], shared));
        let waits = Truth {
            wait_ms_p99: Some(100.0),
            ..shared
        };
        assert!(is_wrong("overloaded", &[], waits));
        assert!(!is_wrong("overloaded", &["workers-busy"], waits));
        let hangs = Truth {
            latency_ms_p99: 3000.0,
            ..WELL
        };
        assert!(is_wrong("hangs", &["long-waits"], hangs));
        assert!(!is_wrong("hangs", &["stuck-worker"], hangs));
        let uneven = Truth {
            busiest: 3.0,
            latency_ms_p99: 20.0,
            ..shared
        };
        assert!(is_wrong("kept", &[HERDS[0]], uneven));
        let harmless = Truth {
            latency_ms_p99: 5.0,
            ..uneven
        };
        assert!(!is_wrong("kept", &[HERDS[0]], harmless));
        assert!(!is_wrong("kept", &["lifo-imbalance"], uneven));
        assert!(!is_wrong(
            "kept",
            &[],
            Truth {
                shared: false,
                ..uneven
            }
        ));
    }
}
