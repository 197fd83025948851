//! A SYN that finds a full accept queue is dropped, and the client sends it again.

/// The first retransmissions come at equal distances (net.ipv4.tcp_syn_linear_timeouts, Linux 6.5 and later).
const LINEAR: u32 = 4;
/// Each further one takes twice as long (net.ipv4.tcp_syn_retries).
const DOUBLING: u32 = 6;

/// Returns how long after the last SYN a client sends the next one, in s, when this many were dropped (at least one).
/// `None`: it gives up. (include/net/tcp.h, net/ipv4/tcp_timer.c; the first timeout is a second.)
pub(crate) fn again_s(dropped: u32) -> Option<f64> {
    (dropped <= LINEAR + DOUBLING).then(|| 2_f64.powi(dropped.saturating_sub(LINEAR + 1) as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Documentation/networking/ip-sysctl.rst: timeouts of 1, 1, 1, 1, 1, 2, 4 … s, the last retransmission after 67 s.
    #[test]
    fn waits_are_those_of_linux() {
        let waits: Vec<f64> = (1..).map_while(again_s).collect();
        assert_eq!(waits, [1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]);
        assert_eq!(waits.iter().sum::<f64>(), 67.0);
    }
}
