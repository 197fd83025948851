//! The policies by name.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};
use wakeone_bpf::contract::number;
use wakeone_bpf::table::{AFFINITY, DATAGRAMS, QUIC, Table};

/// How a worker is chosen for a connection. The numbers are those of `enum wakeone_policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u32)]
pub enum Policy {
    /// By the connection's addresses and ports: the kernel's own policy.
    Hash = number::HASH,
    /// In turn.
    RoundRobin = number::ROUND_ROBIN,
    /// By chance.
    Random = number::RANDOM,
    /// The one with the fewest open connections for its weight.
    #[default]
    LeastConnections = number::LEAST_CONNECTIONS,
    /// The less loaded of two drawn by chance (Mitzenmacher's power of two choices).
    TwoChoices = number::TWO_CHOICES,
    /// The one with the shortest accept queue.
    ShortestQueue = number::SHORTEST_QUEUE,
    /// By the CPU that got the packet.
    Cpu = number::CPU,
    /// By addresses and ports, so that a slot that comes or goes moves the fewest (rendezvous hashing).
    Consistent = number::CONSISTENT,
    /// By the client's address, of IPv6 by its network of /64: a client stays with its worker until that goes.
    Source = number::SOURCE,
    /// By the client's network: /24, of IPv6 /48.
    SourceNet = number::SOURCE_NET,
}

impl Policy {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; number::POLICIES as usize] = [
        Self::Hash,
        Self::RoundRobin,
        Self::Random,
        Self::LeastConnections,
        Self::TwoChoices,
        Self::ShortestQueue,
        Self::Cpu,
        Self::Consistent,
        Self::Source,
        Self::SourceNet,
    ];

    /// The name that a user types.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hash => "hash",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::LeastConnections => "least-connections",
            Self::TwoChoices => "two-choices",
            Self::ShortestQueue => "shortest-queue",
            Self::Cpu => "cpu",
            Self::Consistent => "consistent",
            Self::Source => "source",
            Self::SourceNet => "source-net",
        }
    }

    /// The number in the shared table.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The policy of a number in the shared table.
    pub fn of_number(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// The default policy for UDP sockets. The length of a queue is all that is known of a worker's load, but of QUIC its
    /// connections are known.
    pub fn for_datagrams(affinity: Affinity) -> Self {
        match affinity {
            Affinity::Quic => Self::LeastConnections,
            Affinity::Flow | Affinity::None => Self::ShortestQueue,
        }
    }

    /// Checks that the policy can place datagrams.
    ///
    /// # Errors
    /// The reason, as the end of a sentence, with the policies that can.
    pub fn fits_datagrams(self, affinity: Affinity) -> Result<(), String> {
        let is_quic = affinity == Affinity::Quic;
        let why = match self {
            _ if self.needs_counts() && !is_quic => {
                "goes by open connections, which UDP has none of"
            }
            _ if self.is_sticky() => "is for connections",
            _ => return Ok(()),
        };
        let counted = match is_quic {
            true => "least-connections, two-choices, ",
            false => "",
        };
        Err(format!(
            "{self} {why}; {counted}shortest-queue, round-robin, random, cpu, hash and consistent fit"
        ))
    }

    /// Whether all connections of a client go to one worker. A stuck worker's queue is then moved to others only if that
    /// was asked for.
    pub fn is_sticky(self) -> bool {
        matches!(self, Self::Source | Self::SourceNet)
    }

    /// Checks that workers which share one queue can be steered by the policy.
    ///
    /// # Errors
    /// The reason, as the end of a sentence, with the policies that can.
    pub fn fits_one_queue(self) -> Result<(), String> {
        match self {
            Self::LeastConnections | Self::RoundRobin => Ok(()),
            other => Err(format!(
                "{other} is not for workers that share one queue; least-connections and round-robin fit"
            )),
        }
    }

    /// Returns the policy for datagrams without our program. The kernel's hash keeps flows together; a classic program,
    /// random or cpu, does not. Nothing else knows the IDs of QUIC. `None`: there is none as asked for.
    pub fn without_program(wanted: Option<Self>, affinity: Option<Affinity>) -> Option<Self> {
        let by_chance = affinity == Some(Affinity::None);
        match wanted {
            _ if affinity == Some(Affinity::Quic) => None,
            None if by_chance => Some(Self::Random),
            None => Some(Self::Hash),
            Some(Self::Random | Self::Cpu) if affinity != Some(Affinity::Flow) => wanted,
            Some(Self::Hash) if !by_chance => wanted,
            Some(_) => None,
        }
    }

    /// Whether it looks at how many connections a worker has open.
    pub fn needs_counts(self) -> bool {
        matches!(self, Self::LeastConnections | Self::TwoChoices)
    }
}

/// How datagrams of one flow (addresses and ports) are kept together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Affinity {
    /// The policy places the first datagram of a flow; the others follow it while its worker is well.
    #[default]
    Flow,
    /// The policy places each datagram.
    None,
    /// Packets of QUIC go to the worker that has their connection, by the IDs in them. The policy places new connections.
    Quic,
}

impl Affinity {
    /// That of a group's table; `None`: its sockets are not of UDP.
    pub fn of(table: &Table) -> Option<Self> {
        match table.flags().load(Relaxed) {
            flags if flags & DATAGRAMS == 0 => None,
            flags if flags & QUIC != 0 => Some(Self::Quic),
            flags if flags & AFFINITY != 0 => Some(Self::Flow),
            _ => Some(Self::None),
        }
    }
}

impl fmt::Display for Affinity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flow => "flow",
            Self::None => "none",
            Self::Quic => "quic",
        })
    }
}

impl FromStr for Affinity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "flow" => Ok(Self::Flow),
            "none" => Ok(Self::None),
            "quic" => Ok(Self::Quic),
            _ => Err(format!(
                "`{text}` is no affinity; there are flow, none and quic"
            )),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == text)
            .ok_or_else(|| {
                let names = Self::ALL.map(Self::name).join(", ");
                format!("`{text}` is no policy; there are {names}")
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_our_program_flows_are_kept_by_the_hash_only() {
        use Affinity::{Flow, None as Each, Quic};
        use Policy::{Cpu, Hash, Random, RoundRobin, ShortestQueue};
        for (wanted, affinity, had) in [
            (None, None, Some(Hash)),
            (None, Some(Flow), Some(Hash)),
            (None, Some(Each), Some(Random)),
            (Some(Cpu), None, Some(Cpu)),
            (Some(Random), Some(Each), Some(Random)),
            (Some(Random), Some(Flow), None),
            (Some(Hash), Some(Flow), Some(Hash)),
            (Some(Hash), Some(Each), None),
            (Some(RoundRobin), None, None),
            (Some(ShortestQueue), None, None),
            (None, Some(Quic), None),
        ] {
            assert_eq!(
                Policy::without_program(wanted, affinity),
                had,
                "{wanted:?} {affinity:?}"
            );
        }
    }

    #[test]
    fn names_and_numbers_lead_back() {
        for policy in Policy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
            assert_eq!(Policy::of_number(policy.number()), Some(policy));
        }
        assert_eq!(Policy::of_number(number::POLICIES), None);
        assert!(
            "least"
                .parse::<Policy>()
                .is_err_and(|said| said.contains("least-connections"))
        );
    }
}
