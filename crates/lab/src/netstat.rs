//! The kernel's TCP and UDP counters of this network namespace.

use std::collections::BTreeMap;

/// The counters of this thread's network namespace, by the kernel's names.
pub fn counters() -> BTreeMap<String, u64> {
    parse(&std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap_or_default())
}

/// The kernel's UDP counters of this network namespace: datagrams dropped because a receive queue was full are
/// `RcvbufErrors`.
pub fn udp() -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|l| l.starts_with("Udp:")).collect();
    parse(&lines.join("\n"))
}

/// Pairs of lines: names, then values.
fn parse(text: &str) -> BTreeMap<String, u64> {
    let lines: Vec<&str> = text.lines().collect();
    let pairs = lines.chunks(2).filter(|pair| pair.len() == 2);
    pairs
        .flat_map(|pair| {
            pair[0]
                .split_whitespace()
                .zip(pair[1].split_whitespace())
                .skip(1)
        })
        .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values() {
        let found = parse(
            "TcpExt: SyncookiesSent ListenOverflows\nTcpExt: 3 17\nIpExt: InNoRoutes\nIpExt: 4\n",
        );
        assert_eq!((found["ListenOverflows"], found["InNoRoutes"]), (17, 4));
    }
}
