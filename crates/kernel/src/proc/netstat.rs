//! The kernel's protocol counters of a network namespace: `/proc/PID/net/netstat` and `/proc/PID/net/snmp`.

use crate::proc::stat;

/// All counters of a network namespace at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters(String);

impl Counters {
    /// Reads the counters of a process's network namespace, or of this thread's. Empty where they cannot be read.
    pub fn read(pid: Option<u32>) -> Self {
        let text = |file| {
            let read = match pid {
                Some(pid) => stat::text_of(pid, &format!("net/{file}")),
                None => stat::text(format!("/proc/thread-self/net/{file}")),
            };
            read.unwrap_or_default()
        };
        Self(text("netstat") + &text("snmp"))
    }

    /// Parses a text like the kernel's.
    #[cfg(test)]
    pub(crate) fn of(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Returns one counter by the kernel's names: `TcpExt`, `ListenOverflows`. 0 where the kernel does not know it.
    pub fn get(&self, protocol: &str, name: &str) -> u64 {
        // A line of names and a line of values for each protocol.
        let mut lines = self
            .0
            .lines()
            .filter_map(|line| line.strip_prefix(protocol)?.strip_prefix(':'));
        let (Some(names), Some(values)) = (lines.next(), lines.next()) else {
            return 0;
        };
        let mut pairs = names.split_whitespace().zip(values.split_whitespace());
        let value = pairs.find(|(n, _)| *n == name).map(|(_, value)| value);
        value.and_then(|value| value.parse().ok()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn counters_by_name() {
        let text = "TcpExt: A B ListenDrops\nTcpExt: 1 2 3\nIpExt: A\nIpExt: 9\nUdp: A\nUdp: 4\nUdpLite: A\nUdpLite: 5\n";
        let counters = Counters(text.into());
        assert_eq!(counters.get("TcpExt", "ListenDrops"), 3);
        assert_eq!(counters.get("IpExt", "A"), 9);
        assert_eq!(counters.get("Udp", "A"), 4);
        assert_eq!(counters.get("TcpExt", "C"), 0);
        let own = Counters::read(None);
        assert!(own.get("Tcp", "MaxConn") > 0 || own.0.contains("MaxConn"));
        assert_eq!(Counters::read(Some(u32::MAX)), Counters::default());
    }

    proptest! {
        #[test]
        fn no_text_breaks_it(text in "\\PC{0,200}") {
            let _ = Counters(format!("T: {text}\nT: {text}")).get("T", "a");
        }
    }
}
