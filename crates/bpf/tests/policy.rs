//! Properties of `bpf/policy.h`, in its native build: the very text that chooses in the kernel.
//!
//! [`Given`] defines the behaviour of a policy a second time, slowly and in wide integers. Random choices are tested
//! in two ways. Either the draws are laid evenly over their whole range, so that the answer has no noise to allow for.
//! Or they are random and judged by chi-square, with a limit that a fair policy passes all but once in billions of
//! times.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;
use proptest::sample::select;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use wakeone_bpf::contract::number::{
    CONSISTENT, CPU, HASH, LEAST_CONNECTIONS, POLICIES, RANDOM, ROUND_ROBIN, SHORTEST_QUEUE,
    SOURCE, SOURCE_NET, TWO_CHOICES,
};
use wakeone_bpf::contract::{wakeone_draw, wakeone_slot, wakeone_table};
use wakeone_bpf::policy::{
    TIER_GOOD, enter, leave, pick, pick_in_place, pick_living, publish, tier, two,
};
use wakeone_bpf::table::flag::{DRAINING, STUCK, UP};
use wakeone_bpf::table::{
    AFFINITY, CLOSING, COUNTED, DATAGRAMS, DEFERS, MARKED, MAX_SLOTS, REFUSING, SHARED, Table,
    WINDOW,
};

/// Picks over which weights are measured.
const PICKS: u64 = 100_000;

/// A table, and the expected choices from it.
#[derive(Debug, Clone)]
struct Given {
    slots: Vec<wakeone_slot>,
    /// Fills the rest of the table: memory that is no slot and must not be looked at.
    beyond: wakeone_slot,
}

impl Given {
    fn new(slots: Vec<wakeone_slot>) -> Self {
        // Nothing is more attractive than an idle slot of the greatest weight.
        let beyond = up(65_535, 0);
        Self { slots, beyond }
    }

    fn table(&self, policy: u32) -> Box<wakeone_table> {
        let mut table = Box::new(wakeone_table {
            policy,
            slots: self.slots.len() as u32,
            slot: [self.beyond; MAX_SLOTS],
            ..Default::default()
        });
        table.slot[..self.slots.len()].copy_from_slice(&self.slots);
        publish(&mut table);
        table
    }

    fn with_tier(&self, wanted: u32, agent_gone: bool) -> Vec<usize> {
        (0..self.slots.len())
            .filter(|&i| expected_tier(&self.slots[i], agent_gone) == wanted)
            .collect()
    }

    /// The slots that a policy may choose from: all of the best tier that has any.
    fn eligible(&self, agent_gone: bool) -> Vec<usize> {
        (1..=TIER_GOOD)
            .rev()
            .map(|tier| self.with_tier(tier, agent_gone))
            .find(|slots| !slots.is_empty())
            .unwrap_or_default()
    }

    fn weight(&self, slots: &[usize]) -> u64 {
        slots.iter().map(|&i| u64::from(self.slots[i].weight)).sum()
    }

    /// The slots of `among` that none is below by load over weight.
    fn least(&self, among: &[usize], by: Load) -> Vec<usize> {
        let below = |a: usize, b: usize| by.of(&self.slots[a]) < by.of(&self.slots[b]);
        among
            .iter()
            .copied()
            .filter(|&i| !among.iter().any(|&other| below(other, i)))
            .collect()
    }
}

/// The measure by which a slot is loaded.
#[derive(Debug, Clone, Copy)]
enum Load {
    Active,
    Queued,
}

impl Load {
    fn of(self, slot: &wakeone_slot) -> Share {
        let carried = match self {
            Self::Active => slot.active.max(0) as u128,
            Self::Queued => u128::from(slot.queued),
        };
        Share(carried + 1, u128::from(slot.weight))
    }
}

/// A load over a weight, compared as fractions are.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Share(u128, u128);

impl PartialOrd for Share {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        (self.0 * other.1).partial_cmp(&(other.0 * self.1))
    }
}

fn expected_tier(slot: &wakeone_slot, agent_gone: bool) -> u32 {
    let has = |flag| slot.flags & flag != 0;
    match () {
        () if !has(UP) || slot.weight == 0 => 0,
        () if has(DRAINING) => 1,
        () if has(STUCK) && !agent_gone => 2,
        () => 3,
    }
}

fn up(weight: u32, active: i64) -> wakeone_slot {
    wakeone_slot {
        flags: UP,
        weight,
        active,
        ..Default::default()
    }
}

// ---- the cases --------------------------------------------------------------

fn any_slot() -> impl Strategy<Value = wakeone_slot> {
    // Flags that do not exist yet must change nothing. Most slots are up, else the lower tiers hide behind `down`.
    let flags = prop_oneof![
        4 => Just(UP),
        4 => (0..8_u32).prop_map(|flags| flags | UP),
        1 => 0..8_u32,
        1 => any::<u32>(),
    ];
    let weight = prop_oneof![4 => Just(1), 3 => 1..=10_u32, 1 => 1..=65_535_u32, 1 => Just(0)];
    let active = prop_oneof![4 => 0..4_i64, 4 => 0..1000_i64, 1 => 0..1_i64 << 31, 1 => -5..0_i64];
    let queued = prop_oneof![4 => 0..4_u32, 4 => 0..1000_u32, 1 => 0..1_u32 << 31];
    (flags, weight, active, queued).prop_map(|(flags, weight, active, queued)| wakeone_slot {
        flags,
        weight,
        active,
        queued,
        ..Default::default()
    })
}

fn any_draw() -> impl Strategy<Value = wakeone_draw> {
    let extreme = || prop_oneof![1 => select(vec![0, u32::MAX]), 8 => any::<u32>()];
    let numbers = (extreme(), extreme(), any::<u32>(), any::<u64>());
    (numbers, 0..=1_u32, 0..=1_u32).prop_map(|(numbers, agent_gone, queues_fresh)| {
        let (random, hash, cpu, tick) = numbers;
        wakeone_draw {
            random,
            hash,
            cpu,
            tick,
            agent_gone,
            queues_fresh,
            ..Default::default()
        }
    })
}

/// Few slots as often as many: few is what most servers have, and where tiers run empty.
fn any_group() -> impl Strategy<Value = Given> {
    prop_oneof![
        prop::collection::vec(any_slot(), 1..=6),
        prop::collection::vec(any_slot(), 1..=MAX_SLOTS),
    ]
    .prop_map(Given::new)
}

/// A group that the window shows whole.
fn shown_group() -> impl Strategy<Value = Given> {
    prop_oneof![
        prop::collection::vec(any_slot(), 1..=6),
        prop::collection::vec(any_slot(), 1..=WINDOW),
    ]
    .prop_map(Given::new)
}

/// Slots that a policy may choose, with these weights, and between them some that it may not.
fn weighted_group(
    weights: std::ops::RangeInclusive<u32>,
    most: usize,
) -> impl Strategy<Value = Given> {
    let slot = prop_oneof![
        5 => weights.prop_map(|weight| up(weight, 0)),
        1 => (1..8_u32, 0..9_u32).prop_map(|(marks, weight)| wakeone_slot {
            flags: if marks == UP { 0 } else { marks },
            ..up(weight, 0)
        }),
    ];
    prop::collection::vec(slot, 1..=most)
        .prop_map(Given::new)
        .prop_filter("one is good", |given| {
            !given.with_tier(TIER_GOOD, false).is_empty()
        })
}

fn random_draw(chance: &mut StdRng) -> wakeone_draw {
    wakeone_draw {
        random: chance.next_u32(),
        ..Default::default()
    }
}

/// The same of a random flow.
fn random_flow(chance: &mut StdRng) -> wakeone_draw {
    wakeone_draw {
        hash: chance.next_u32(),
        ..random_draw(chance)
    }
}

/// The i-th of `n` values that stand evenly over all of 32 bits.
fn even(i: u64, n: u64) -> u32 {
    ((i << 32) / n) as u32
}

/// Whether these counts may come from equal chances.
///
/// Eight deviations of the chi-square distribution above its mean, and 30 for the few degrees of freedom where it is
/// far from normal: less than one fair run in 10⁹ is refused, and with 400 draws for each count a bias of a few per
/// cent is.
fn assert_even(counts: &[u64]) {
    let draws = counts.iter().sum::<u64>() as f64;
    let expected = draws / counts.len() as f64;
    let chi_square: f64 = counts
        .iter()
        .map(|&n| (n as f64 - expected).powi(2) / expected)
        .sum();
    let freedom = counts.len() as f64 - 1.0;
    let limit = freedom + 8.0 * (2.0 * freedom).sqrt() + 30.0;
    assert!(
        chi_square < limit,
        "chi-square {chi_square:.1}, at most {limit:.1}: {counts:?}"
    );
}

/// So many cases, or fewer by PROPTEST_CASES: scripts/mutate-policy first tries a change on a few.
fn cases(cases: u32) -> ProptestConfig {
    let most = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig {
        cases: most
            .and_then(|most| most.parse().ok())
            .unwrap_or(cases)
            .min(cases),
        // A failure prints its smallest input; a file beside the sources is not where to keep it.
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

// ---- eligible slots ---------------------------------------------------------

#[test]
fn marks_weight_and_the_agent_make_the_tier() {
    let tiers_of = |flags: u32, weight: u32| {
        let slot = wakeone_slot {
            flags,
            weight,
            ..Default::default()
        };
        (tier(&slot, false), tier(&slot, true))
    };
    // (with an agent, without one)
    assert_eq!(tiers_of(UP, 1), (3, 3));
    assert_eq!(tiers_of(UP | STUCK, 1), (2, 3));
    assert_eq!(tiers_of(UP | DRAINING, 1), (1, 1));
    assert_eq!(tiers_of(UP | DRAINING | STUCK, 1), (1, 1));
    for down in [0, STUCK, DRAINING, DRAINING | STUCK] {
        assert_eq!(tiers_of(down, 1), (0, 0), "flags {down}");
    }
    for flags in 0..8 {
        assert_eq!(tiers_of(flags, 0), (0, 0), "weight 0, flags {flags}");
    }
    assert_eq!(tiers_of(UP, 65_535), (3, 3));
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn every_choice_is_of_the_best_tier(
        given in any_group(),
        policy in 0..POLICIES,
        draw in any_draw(),
    ) {
        // Clients stay with a worker that is stuck.
        let ignores_stuck = draw.agent_gone == 1 || [SOURCE, SOURCE_NET].contains(&policy);
        let eligible = given.eligible(ignores_stuck);
        match pick(&given.table(policy), &draw) {
            None => prop_assert_eq!(eligible, Vec::<usize>::new()),
            Some(slot) => prop_assert!(eligible.contains(&slot), "{slot} is not of {eligible:?}"),
        }
    }

    #[test]
    fn the_shorter_way_leads_to_the_same_slot(
        mut given in any_group(),
        equal in any::<bool>(),
        policy in 0..POLICIES + 1,
        draw in any_draw(),
    ) {
        if equal {
            given.slots.iter_mut().for_each(|slot| slot.weight = slot.weight.min(1));
        }
        let table = given.table(policy);
        prop_assert_eq!(pick_in_place(&table, &draw), pick(&table, &draw));
    }

    #[test]
    fn one_slot_left_is_always_found(
        mut given in any_group(),
        policy in 0..POLICIES,
        at in any::<prop::sample::Index>(),
        marks in select(vec![0, STUCK, DRAINING, STUCK | DRAINING]),
        draw in any_draw(),
    ) {
        let only = at.index(given.slots.len());
        given.slots.iter_mut().for_each(|slot| slot.flags &= !UP);
        given.slots[only] = wakeone_slot { flags: UP | marks, ..up(1, 1000) };
        prop_assert_eq!(pick(&given.table(policy), &draw), Some(only));
    }

    #[test]
    fn nothing_is_chosen_where_no_slot_is_up(
        mut given in any_group(),
        policy in 0..POLICIES,
        draw in any_draw(),
        weightless in any::<bool>(),
    ) {
        for slot in &mut given.slots {
            if weightless { slot.weight = 0 } else { slot.flags &= !UP }
        }
        prop_assert_eq!(pick(&given.table(policy), &draw), None);
        prop_assert_eq!(pick_living(&given.table(policy), &draw), None);
        let mut none = given.table(policy);
        none.slots = 0;
        none.slot = [up(1, 0); MAX_SLOTS];
        publish(&mut none);
        prop_assert_eq!(pick(&none, &draw), None);
        prop_assert_eq!(pick_living(&none, &draw), None);
    }

    #[test]
    fn an_unknown_policy_chooses_nothing(
        given in any_group(),
        policy in prop_oneof![Just(POLICIES), Just(u32::MAX), POLICIES..],
        draw in any_draw(),
    ) {
        prop_assert_eq!(pick(&given.table(policy), &draw), None);
    }

    #[test]
    fn more_slots_than_there_is_room_for_are_not_looked_for(
        policy in 0..POLICIES,
        slots in prop_oneof![Just(u32::MAX), MAX_SLOTS as u32..],
        draw in any_draw(),
    ) {
        let mut table = Given::new(vec![up(1, 0); MAX_SLOTS]).table(policy);
        let among_all = pick(&table, &draw);
        table.slots = slots;
        publish(&mut table);
        prop_assert!(among_all.is_some_and(|slot| slot < MAX_SLOTS));
        prop_assert_eq!(pick(&table, &draw), among_all);
    }

    #[test]
    fn policies_that_do_not_look_at_load_are_not_moved_by_it(
        given in any_group(),
        policy in select(vec![HASH, ROUND_ROBIN, RANDOM, CPU, CONSISTENT, SOURCE, SOURCE_NET]),
        draw in any_draw(),
        load in prop::collection::vec((0..1000_i64, 0..1000_u32), MAX_SLOTS),
    ) {
        let mut other = given.clone();
        for (slot, (active, queued)) in other.slots.iter_mut().zip(load) {
            (slot.active, slot.queued) = (active, queued);
        }
        prop_assert_eq!(pick(&given.table(policy), &draw), pick(&other.table(policy), &draw));
    }
}

/// The shorter ways are for slots of one weight, whatever that is.
#[test]
fn equal_weights_are_told_from_others() {
    for (weights, weighted) in [
        (&[7, 7, 7][..], 0),
        (&[7, 7, 1], 1),
        (&[7, 0, 7], 0),
        (&[1, 7], 1),
    ] {
        let slots = weights.iter().map(|weight| up(*weight, 0)).collect();
        let table = Given::new(slots).table(HASH);
        let listed = &table.eligible[table.generation as usize % 2 * 2];
        assert_eq!(listed.weighted, weighted, "weights {weights:?}");
    }
}

/// A group that refuses connections while it shuts down must go on to, also when a worker leaves meanwhile.
#[test]
fn a_new_list_leaves_what_the_group_was_told() {
    for slots in [WINDOW, WINDOW + 1] {
        for told in [
            CLOSING, COUNTED, MARKED, DATAGRAMS, AFFINITY, REFUSING, SHARED,
        ] {
            let mut table = Given::new(vec![up(1, 0); slots]).table(HASH);
            assert_eq!(table.flags & told, 0, "{slots} slots set flag {told}");
            table.flags |= told;
            publish(&mut table);
            assert_eq!(table.flags & told, told, "{slots} slots, flag {told}");
        }
    }
}

// ---- among the living -------------------------------------------------------

/// Slots of which some are marked as gone.
fn group_with_gone(group: impl Strategy<Value = Given>) -> impl Strategy<Value = Given> {
    let marks = prop::collection::vec(0..=1_u32, MAX_SLOTS);
    (group, marks).prop_map(|(mut given, marks)| {
        for (slot, gone) in given.slots.iter_mut().zip(marks) {
            slot.gone = gone;
        }
        given
    })
}

/// How often each of the last three slots is chosen, when the five before them are gone.
fn second_choices(policy: u32, weights: [u32; 3], draws: u64) -> [u64; 3] {
    let gone = wakeone_slot {
        gone: 1,
        ..up(1, 0)
    };
    let mut slots = vec![gone; 5];
    slots.extend(weights.map(|weight| up(weight, 0)));
    let table = Given::new(slots).table(policy);
    let mut chance = StdRng::seed_from_u64(29);
    let mut chosen = [0; 3];
    for _ in 0..draws {
        let draw = random_flow(&mut chance);
        chosen[pick_living(&table, &draw).expect("a slot") - 5] += 1;
    }
    chosen
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn a_second_choice_is_of_the_best_tier_and_lives(
        given in group_with_gone(shown_group()),
        policy in 0..POLICIES,
        draw in any_draw(),
    ) {
        let eligible = given.eligible(draw.agent_gone == 1);
        let living: Vec<usize> =
            eligible.iter().copied().filter(|&i| given.slots[i].gone == 0).collect();
        match pick_living(&given.table(policy), &draw) {
            None => prop_assert_eq!(eligible, Vec::<usize>::new()),
            // If all are marked, one of them is tried all the same.
            Some(slot) if living.is_empty() => prop_assert!(eligible.contains(&slot)),
            Some(slot) => prop_assert!(living.contains(&slot), "{slot} is not of {living:?}"),
        }
    }

    #[test]
    fn a_second_choice_by_load_is_the_least_of_the_living(
        given in group_with_gone(shown_group()),
        policy in select(vec![LEAST_CONNECTIONS, TWO_CHOICES]),
        draw in any_draw(),
    ) {
        let mut living = given.eligible(draw.agent_gone == 1);
        living.retain(|&i| given.slots[i].gone == 0);
        let slot = pick_living(&given.table(policy), &draw);
        prop_assume!(!living.is_empty());
        let least = given.least(&living, Load::Active);
        prop_assert!(least.contains(&slot.expect("a slot")), "{slot:?} is not of {least:?}");
    }

    #[test]
    fn a_first_choice_ignores_that_a_slot_was_gone(
        given in group_with_gone(any_group()),
        policy in 0..POLICIES,
        draw in any_draw(),
    ) {
        let mut other = given.clone();
        other.slots.iter_mut().for_each(|slot| slot.gone = 0);
        prop_assert_eq!(pick(&given.table(policy), &draw), pick(&other.table(policy), &draw));
    }

    #[test]
    fn a_flow_of_a_gone_slot_goes_where_it_goes_without_that_slot(
        given in group_with_gone(any_group()),
        draw in any_draw(),
    ) {
        let mut without = given.clone();
        let mut eligible = without.eligible(draw.agent_gone == 1);
        eligible.retain(|&i| {
            let gone = without.slots[i].gone != 0;
            without.slots[i].flags &= if gone { !UP } else { !0 };
            !gone
        });
        prop_assume!(!eligible.is_empty());
        prop_assert_eq!(
            pick_living(&given.table(CONSISTENT), &draw),
            pick(&without.table(CONSISTENT), &draw)
        );
    }
}

/// A group of as many slots, of which the first one is gone.
fn with_one_gone(slots: usize) -> Given {
    let mut given = Given::new(vec![up(1, 7); slots]);
    given.slots[0].gone = 1;
    given
}

#[test]
fn a_client_keeps_its_slot_whatever_the_chance_and_the_marks() {
    let mut chance = StdRng::seed_from_u64(31);
    let mut given = with_one_gone(8);
    let by_hash = given.table(CONSISTENT);
    let unmarked = [SOURCE, SOURCE_NET].map(|policy| given.table(policy));
    given.slots[..4]
        .iter_mut()
        .for_each(|slot| slot.flags |= STUCK);
    let marked = [SOURCE, SOURCE_NET].map(|policy| given.table(policy));
    for _ in 0..200 {
        let draw = random_flow(&mut chance);
        for table in unmarked.iter().chain(&marked) {
            assert_eq!(pick(table, &draw), pick(&by_hash, &draw));
        }
        for table in &unmarked {
            assert_eq!(pick_living(table, &draw), pick_living(&by_hash, &draw));
        }
    }
}

#[test]
fn a_second_choice_goes_by_the_queues_while_somebody_publishes_them() {
    let mut given = Given::new(vec![up(1, 5), up(1, 0), up(1, 9)]);
    for (slot, queued) in given.slots.iter_mut().zip([2, 3, 1]) {
        slot.queued = queued;
    }
    let table = given.table(SHORTEST_QUEUE);
    for (agent_gone, expected) in [(0, 2), (1, 1)] {
        let draw = wakeone_draw {
            agent_gone,
            ..Default::default()
        };
        assert_eq!(pick_living(&table, &draw), Some(expected));
    }
    let by_connections = given.table(LEAST_CONNECTIONS);
    assert_eq!(pick_living(&by_connections, &Default::default()), Some(1));
}

#[test]
fn a_second_choice_looks_at_every_part_of_a_large_group() {
    let mut chance = StdRng::seed_from_u64(37);
    for slots in [WINDOW + 1, MAX_SLOTS] {
        let table = with_one_gone(slots).table(LEAST_CONNECTIONS);
        let draws = (0..20_000).map(|_| random_draw(&mut chance));
        let chosen: BTreeSet<_> = draws.map(|draw| pick_living(&table, &draw)).collect();
        assert_eq!(chosen.len(), slots - 1);
    }
}

#[test]
fn no_neighbour_of_a_gone_slot_gets_more_than_the_others() {
    for policy in 0..POLICIES {
        assert_even(&second_choices(policy, [1, 1, 1], 3_000));
    }
    // Policies without load divide by weight, up to the two hundredths of `wakeone_cost`.
    for policy in [HASH, ROUND_ROBIN, RANDOM, CPU, CONSISTENT] {
        let chosen = second_choices(policy, [1, 2, 5], PICKS);
        for (chosen, weight) in chosen.iter().zip([1, 2, 5]) {
            let share = *chosen as f64 / PICKS as f64 * 8.0 / f64::from(weight);
            assert!((0.96..1.04).contains(&share), "policy {policy}: {share}");
        }
    }
}

// ---- least is least ---------------------------------------------------------

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn least_connections_is_least_by_weight(
        mut given in shown_group(),
        equal in any::<bool>(),
        draw in any_draw(),
    ) {
        if equal {
            given.slots.iter_mut().for_each(|slot| slot.weight = slot.weight.min(1));
        }
        let least = given.least(&given.eligible(draw.agent_gone == 1), Load::Active);
        match pick(&given.table(LEAST_CONNECTIONS), &draw) {
            None => prop_assert!(least.is_empty()),
            Some(slot) => prop_assert!(least.contains(&slot), "{slot} is not of {least:?}"),
        }
    }

    #[test]
    fn the_shortest_queue_is_shortest_while_somebody_looks(given in any_group(), draw in any_draw()) {
        let gone = draw.agent_gone == 1;
        let by = if gone && draw.queues_fresh == 0 { Load::Active } else { Load::Queued };
        // By open connections a large group is judged below.
        prop_assume!(matches!(by, Load::Queued) || given.slots.len() <= WINDOW);
        let least = given.least(&given.eligible(gone), by);
        match pick(&given.table(SHORTEST_QUEUE), &draw) {
            None => prop_assert!(least.is_empty()),
            Some(slot) => prop_assert!(least.contains(&slot), "{slot} is not of {least:?}, by {by:?}"),
        }
    }

    #[test]
    fn a_count_below_zero_is_no_less_than_an_idle_slot(
        below in prop_oneof![Just(i64::MIN), i64::MIN..0],
        random in any::<u32>(),
    ) {
        // A weight of 2 makes an idle slot the lesser one: a count below zero must not win against it.
        let table = Given::new(vec![up(1, below), up(2, 0), up(1, below)]).table(LEAST_CONNECTIONS);
        let draw = wakeone_draw { random, ..Default::default() };
        prop_assert_eq!(pick(&table, &draw), Some(1));
    }
}

#[test]
fn the_shortest_queue_is_found_among_any_number_from_wherever_the_look_begins() {
    let mut chance = StdRng::seed_from_u64(200);
    for slots in [1, 4, WINDOW, WINDOW + 1, 64, 100, 150, 200, 255, MAX_SLOTS] {
        let busy = wakeone_slot {
            queued: 1,
            ..up(1, 0)
        };
        let mut table = Given::new(vec![busy; slots]).table(SHORTEST_QUEUE);
        for shortest in 0..slots {
            table.slot[shortest].queued = 0;
            for _ in 0..20 {
                let draw = random_draw(&mut chance);
                assert_eq!(pick(&table, &draw), Some(shortest), "of {slots}");
            }
            table.slot[shortest].queued = 1;
        }
    }
}

/// Slots of which some are equally the least loaded: by the same count, or by another count of another weight.
fn group_with_ties() -> impl Strategy<Value = (Given, Vec<usize>)> {
    let slot = prop_oneof![
        // (active + 1) / weight = 2
        3 => (1..=20_u32).prop_map(|weight| up(weight, i64::from(2 * weight) - 1)),
        2 => (1..=20_u32, 0..50_i64).prop_map(|(weight, more)| up(weight, i64::from(2 * weight) + more)),
        1 => Just(wakeone_slot::default()),
    ];
    prop_oneof![
        prop::collection::vec(slot.clone(), 2..=8),
        prop::collection::vec(slot, 2..=WINDOW),
    ]
    .prop_map(Given::new)
    .prop_map(|given| {
        let least = given.least(&given.eligible(false), Load::Active);
        (given, least)
    })
    .prop_filter("a tie", |(_, least)| least.len() > 1)
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn equals_are_chosen_equally_wherever_they_stand((given, equals) in group_with_ties(), seed in any::<u64>()) {
        let (table, mut chance) = (given.table(LEAST_CONNECTIONS), StdRng::seed_from_u64(seed));
        let mut counts = vec![0; table.slots as usize];
        for _ in 0..400 * equals.len() {
            counts[pick(&table, &random_draw(&mut chance)).expect("a slot is up")] += 1;
        }
        let of_equals: Vec<u64> = equals.iter().map(|&i| counts[i]).collect();
        prop_assert_eq!(of_equals.iter().sum::<u64>(), counts.iter().sum::<u64>());
        assert_even(&of_equals);
    }
}

/// Busy slots that weigh the same, all with one load, and the times of their progress since some moment.
fn busy_group() -> impl Strategy<Value = Given> {
    let slot = (1..100_u32).prop_map(|progress| wakeone_slot {
        progress,
        ..up(1, 2)
    });
    prop::collection::vec(slot, 2..=WINDOW).prop_map(Given::new)
}

proptest! {
    #[test]
    fn of_equally_busy_slots_the_one_with_the_last_progress_is_chosen(
        mut given in busy_group(),
        since in any::<u32>(),
        draw in any_draw(),
    ) {
        // The number of progress may have overflowed, but not meanwhile: it is compared by its lowest 23 bits.
        let base = (since % (1 << 23)).min((1 << 23) - 100);
        given.slots.iter_mut().for_each(|slot| slot.progress += base);
        let last = given.slots.iter().map(|slot| slot.progress).max();
        let slot = pick(&given.table(LEAST_CONNECTIONS), &draw).expect("all are up");
        prop_assert_eq!(Some(given.slots[slot].progress), last);
        // An idle one is better than any of them.
        given.slots.push(up(1, 0));
        let idle = given.slots.len() - 1;
        prop_assume!(given.slots.len() <= WINDOW);
        prop_assert_eq!(pick(&given.table(LEAST_CONNECTIONS), &draw), Some(idle));
    }
}

#[test]
fn one_connection_is_busy_and_the_first_progress_counts() {
    let with = |progress| wakeone_slot {
        progress,
        ..up(1, 1)
    };
    let (table, mut chance) = (
        Given::new(vec![with(1), with(2)]).table(LEAST_CONNECTIONS),
        StdRng::seed_from_u64(2),
    );
    for _ in 0..100 {
        assert_eq!(pick(&table, &random_draw(&mut chance)), Some(1));
    }
}

#[test]
fn the_last_progress_does_not_matter_among_idle_slots() {
    let slots = (0..8).map(|progress| wakeone_slot {
        progress,
        ..up(1, 0)
    });
    let table = Given::new(slots.collect()).table(LEAST_CONNECTIONS);
    let (mut counts, mut chance) = ([0; 8], StdRng::seed_from_u64(8));
    for _ in 0..400 * 8 {
        counts[pick(&table, &random_draw(&mut chance)).expect("all are up")] += 1;
    }
    assert_even(&counts);
}

#[test]
fn all_256_idle_slots_get_the_same() {
    for policy in [LEAST_CONNECTIONS, SHORTEST_QUEUE, TWO_CHOICES, RANDOM] {
        let table = Given::new(vec![up(1, 0); MAX_SLOTS]).table(policy);
        let (mut counts, mut chance) = ([0; MAX_SLOTS], StdRng::seed_from_u64(256));
        for _ in 0..400 * MAX_SLOTS {
            counts[pick(&table, &random_draw(&mut chance)).expect("all are up")] += 1;
        }
        assert_even(&counts);
    }
}

/// The slots that the programs hold for idle.
fn known_idle(table: &wakeone_table) -> Vec<usize> {
    (0..MAX_SLOTS)
        .filter(|slot| table.idle[slot / 64] >> (slot % 64) & 1 == 1)
        .collect()
}

#[test]
fn a_slot_is_known_to_be_idle_from_its_last_connection_to_its_first() {
    let mut table = Given::new(vec![up(1, 0); MAX_SLOTS]).table(LEAST_CONNECTIONS);
    for slot in 0..MAX_SLOTS {
        let others: Vec<_> = (0..MAX_SLOTS).filter(|other| *other != slot).collect();
        for (open, step) in [(1, enter as fn(&mut _, _)), (2, enter), (1, leave)] {
            step(&mut table, slot);
            assert_eq!(known_idle(&table), others, "{open} open at {slot}");
        }
        leave(&mut table, slot);
        assert_eq!(known_idle(&table).len(), MAX_SLOTS, "none open at {slot}");
    }
    // CPUs that pass one another leave a bit that is wrong, or a count below zero.
    table.slot[200].active = 3;
    enter(&mut table, 200);
    assert!(!known_idle(&table).contains(&200));
    table.slot[201].active = -1;
    enter(&mut table, 201);
    assert!(known_idle(&table).contains(&201));
}

/// A count that was found wrong is mended in the table that the programs share.
#[test]
fn a_corrected_count_tells_whether_its_slot_is_idle() {
    let file = tempfile::tempfile().expect("a file");
    let table = Table::create(&file).expect("a table");
    table.slots().store(MAX_SLOTS as u32, Relaxed);
    for slot in 0..MAX_SLOTS {
        table.slot(slot).flags().store(UP, Relaxed);
        table.slot(slot).weight().store(1, Relaxed);
    }
    table.publish();
    let is_idle = |slot: usize| {
        let mut word = [0; 8];
        let at = std::mem::offset_of!(wakeone_table, idle) + slot / 64 * 8;
        file.read_exact_at(&mut word, at as u64).expect("read");
        u64::from_ne_bytes(word) >> (slot % 64) & 1 == 1
    };
    for slot in [0, 63, 64, 200, MAX_SLOTS - 1] {
        for (by, open) in [(5, 5), (-4, 1), (-1, 0), (2, 2), (-3, -1)] {
            table.slot(slot).correct(by);
            assert_eq!(table.slot(slot).active().load(Relaxed), open);
            for other in 0..MAX_SLOTS {
                let expected = other != slot || open <= 0;
                assert_eq!(is_idle(other), expected, "{other}, {open} open at {slot}");
            }
        }
        table.slot(slot).correct(1);
    }
}

#[test]
fn the_one_idle_slot_of_256_is_found() {
    for idle in 0..MAX_SLOTS {
        let mut given = Given::new(vec![up(1, 1); MAX_SLOTS]);
        given.slots[idle].active = 0;
        let table = given.table(LEAST_CONNECTIONS);
        for random in [0, 1, 2, 3, 4 * 63, u32::MAX] {
            let draw = wakeone_draw {
                random,
                ..Default::default()
            };
            assert_eq!(pick(&table, &draw), Some(idle), "drawn {random}");
        }
    }
}

#[test]
fn idle_slots_are_looked_up_once_a_group_is_larger_than_the_window() {
    let mut slots: Vec<_> = (0..MAX_SLOTS).map(|i| up(1, i as i64 % 3)).collect();
    slots[3].active = -1;
    let idle = |slots: &[wakeone_slot]| -> Vec<usize> {
        (0..slots.len()).filter(|i| slots[*i].active <= 0).collect()
    };
    let mut table = Given::new(slots.clone()).table(LEAST_CONNECTIONS);
    assert_eq!(known_idle(&table), idle(&slots));
    // Nobody keeps the bits of a small group up to date, so they are made anew when it grows.
    table.slots = WINDOW as u32;
    publish(&mut table);
    let known = known_idle(&table);
    enter(&mut table, 0);
    leave(&mut table, 1);
    leave(&mut table, 2);
    leave(&mut table, 2);
    assert_eq!(known_idle(&table), known);
    for build in [0, u64::MAX] {
        (table.slots, table.build) = (WINDOW as u32, build);
        publish(&mut table);
        table.slots = MAX_SLOTS as u32;
        publish(&mut table);
        assert_eq!(known_idle(&table), idle(&table.slot));
        assert_eq!(table.build, build, "what stands behind the bits");
    }
}

#[test]
fn a_connection_counts_one_from_when_it_comes_until_it_goes() {
    for slots in [1, WINDOW, WINDOW + 1, MAX_SLOTS] {
        let mut table = Given::new(vec![up(1, 5); slots]).table(LEAST_CONNECTIONS);
        let active = |table: &wakeone_table| table.slot[slots - 1].active;
        enter(&mut table, slots - 1);
        assert_eq!(active(&table), 6);
        leave(&mut table, slots - 1);
        assert_eq!(active(&table), 5);
        assert!((0..slots - 1).all(|i| table.slot[i].active == 5));
    }
}

// ---- more slots than the window shows ----------------------------------------

/// Open connections of each slot after some came and some went: by the policy, and by one that always takes the least
/// loaded slot.
fn carried(slots: usize, weights: &[u32], came: usize, stay: f64) -> (Vec<i64>, Vec<i64>) {
    let given = Given::new(
        (0..slots)
            .map(|i| up(weights[i % weights.len()], 0))
            .collect(),
    );
    let (mut ours, mut exact) = (
        given.table(LEAST_CONNECTIONS),
        given.table(LEAST_CONNECTIONS),
    );
    let mut chance = StdRng::seed_from_u64(slots as u64);
    let (mut open, mut open_exact) = (Vec::new(), Vec::new());
    for _ in 0..came {
        let slot = pick(&ours, &random_draw(&mut chance)).expect("all are up");
        enter(&mut ours, slot);
        open.push(slot);
        let share = |i: &usize| Load::Active.of(&exact.slot[*i]);
        let least = (0..slots).min_by(|a, b| share(a).partial_cmp(&share(b)).expect("fractions"));
        let least = least.expect("there are slots");
        enter(&mut exact, least);
        open_exact.push(least);
        // The same one goes in both: how long a connection lasts does not depend on where it is.
        if chance.random::<f64>() > stay {
            let at = chance.random_range(0..open.len());
            leave(&mut ours, open.swap_remove(at));
            leave(&mut exact, open_exact.swap_remove(at));
        }
    }
    let actives =
        |table: &wakeone_table| table.slot[..slots].iter().map(|slot| slot.active).collect();
    (actives(&ours), actives(&exact))
}

#[test]
fn a_large_group_is_as_even_as_the_exact_policy_within_five_per_cent() {
    for (slots, weights, stay) in [
        (33, &[1][..], 1.0),
        (64, &[1], 1.0),
        (256, &[1], 1.0),
        (256, &[1], 0.2),
        (100, &[1], 0.2),
        (256, &[1, 2, 5], 1.0),
    ] {
        let (ours, exact) = carried(slots, weights, 100 * slots, stay);
        // Both hold as many connections, so the largest shares are as the largest loads for the weight.
        let largest = |loads: &[i64]| {
            let shares = loads.iter().enumerate();
            let by_weight =
                shares.map(|(i, load)| *load as f64 / f64::from(weights[i % weights.len()]));
            by_weight.fold(0.0, f64::max)
        };
        let (ours, exact) = (largest(&ours), largest(&exact));
        assert!(
            ours <= 1.05 * exact,
            "{slots} slots of {weights:?}, {stay} stay: {ours} instead of {exact}"
        );
    }
}

proptest! {
    #![proptest_config(cases(500))]

    #[test]
    fn idle_slots_come_first_however_many_there_are(
        slots in prop::collection::vec(any_slot(), WINDOW + 1..=MAX_SLOTS),
        busy in any::<bool>(),
        changes in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        draw in any_draw(),
    ) {
        let mut given = Given::new(slots);
        given.slots.iter_mut().for_each(|slot| slot.weight = slot.weight.min(1));
        if busy {
            given.slots.iter_mut().for_each(|slot| slot.active += 6);
        }
        let mut table = given.table(LEAST_CONNECTIONS);
        for (turn, at) in changes.iter().enumerate() {
            let slot = at.index(given.slots.len());
            if turn % 2 == 0 && given.slots[slot].active > 0 {
                while given.slots[slot].active > 0 && given.slots[slot].active < 2000 {
                    leave(&mut table, slot);
                    given.slots[slot].active -= 1;
                }
            } else {
                enter(&mut table, slot);
                given.slots[slot].active += 1;
            }
        }
        let eligible = given.eligible(draw.agent_gone == 1);
        let idle: Vec<_> = eligible.iter().copied().filter(|&i| given.slots[i].active <= 0).collect();
        let chosen = pick(&table, &draw);
        prop_assert_eq!(chosen.is_none(), eligible.is_empty());
        if let Some(slot) = chosen {
            prop_assert!(idle.is_empty() || idle.contains(&slot), "{slot} is none of {idle:?}");
            prop_assert!(eligible.contains(&slot));
        }
    }

    #[test]
    fn the_list_that_is_replaced_does_not_matter(
        before in any_group(),
        after in any_group(),
        policy in 0..POLICIES,
        draw in any_draw(),
    ) {
        let mut table = before.table(policy);
        let fresh = after.table(policy);
        table.slots = fresh.slots;
        (table.slot, table.idle) = (fresh.slot, fresh.idle);
        publish(&mut table);
        prop_assert_eq!(pick(&table, &draw), pick(&fresh, &draw));
    }
}

// ---- two choices ------------------------------------------------------------

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn the_two_differ_and_both_may_be_chosen(given in any_group(), draw in any_draw()) {
        let members = given.eligible(draw.agent_gone == 1);
        let (first, second) = two(&given.table(TWO_CHOICES), &draw);
        prop_assert_eq!(first.is_some(), !members.is_empty());
        prop_assert_eq!(second.is_some(), members.len() > 1);
        prop_assert!(first.is_none_or(|slot| members.contains(&slot)), "{first:?} is not of {members:?}");
        prop_assert!(second.is_none_or(|slot| members.contains(&slot)), "{second:?} is not of {members:?}");
        prop_assert!(first.is_none() || first != second);
    }

    #[test]
    fn two_choices_never_takes_the_worse_of_its_two(given in any_group(), draw in any_draw()) {
        let table = given.table(TWO_CHOICES);
        let (first, second) = two(&table, &draw);
        let drawn: Vec<usize> = [first, second].into_iter().flatten().collect();
        let better = given.least(&drawn, Load::Active);
        match pick(&table, &draw) {
            None => prop_assert!(better.is_empty(), "none of {drawn:?}"),
            Some(slot) => prop_assert!(better.contains(&slot), "{slot} of {drawn:?}"),
        }
    }
}

#[test]
fn all_pairs_of_equal_weight_are_drawn_equally_often() {
    const SLOTS: usize = 16;
    let table = Given::new(vec![up(3, 0); SLOTS]).table(TWO_CHOICES);
    let (mut pairs, mut chance) = ([[0; SLOTS]; SLOTS], StdRng::seed_from_u64(2));
    for _ in 0..400 * SLOTS * (SLOTS - 1) {
        let (first, second) = two(&table, &random_draw(&mut chance));
        pairs[first.expect("16 are up")][second.expect("16 are up")] += 1;
    }
    let counts: Vec<u64> = (0..SLOTS * SLOTS)
        .map(|i| (i / SLOTS, i % SLOTS))
        .filter(|(a, b)| a != b)
        .map(|(a, b)| pairs[a][b])
        .collect();
    assert_even(&counts);
}

#[test]
fn the_second_of_two_is_drawn_by_weight_from_the_others() {
    // As in chance_draws_by_weight_too: one per cent of all is six deviations.
    let weights = [1, 4, 2, 10, 3];
    let table = Given::new(weights.map(|weight| up(weight, 0)).to_vec()).table(TWO_CHOICES);
    let (mut pairs, mut chance) = ([[0_u64; 5]; 5], StdRng::seed_from_u64(5));
    for _ in 0..PICKS {
        let (first, second) = two(&table, &random_draw(&mut chance));
        pairs[first.expect("five are up")][second.expect("five are up")] += 1;
    }
    for (first, second) in (0..25).map(|i| (i / 5, i % 5)) {
        let of = |slot: usize| f64::from(weights[slot]);
        let expected = match first == second {
            true => 0.0,
            false => of(first) / 20.0 * of(second) / (20.0 - of(first)),
        };
        let share = pairs[first][second] as f64 / PICKS as f64;
        assert!(
            (share - expected).abs() < 0.01,
            "{first}, then {second}: {share}, not {expected}"
        );
    }
}

// ---- weights ----------------------------------------------------------------

/// The share of each slot of the best tier follows its weight: within 1 % of it, and 2 picks for the ends of its
/// range, which hardly ever fall on a draw.
fn assert_by_weight(given: &Given, counts: &[u64]) {
    let eligible = given.eligible(false);
    let (total, picks) = (
        given.weight(&eligible) as f64,
        counts.iter().sum::<u64>() as f64,
    );
    for &i in &eligible {
        let expected = picks * f64::from(given.slots[i].weight) / total;
        let off = (counts[i] as f64 - expected).abs();
        assert!(
            off <= 0.01 * expected + 2.0,
            "slot {i} of weight {}: {} picks, expected {expected:.1}",
            given.slots[i].weight,
            counts[i]
        );
    }
}

proptest! {
    #![proptest_config(cases(16))]

    #[test]
    fn shares_follow_weights_within_one_per_cent(
        given in prop_oneof![weighted_group(1..=100, 8), weighted_group(1..=20, MAX_SLOTS)],
        policy in select(vec![HASH, ROUND_ROBIN, RANDOM]),
        start in 0..u64::MAX / 2,
    ) {
        let mut counts = vec![0; given.slots.len()];
        let table = given.table(policy);
        for i in 0..PICKS {
            let at = even(i, PICKS);
            // Only what the policy is to look at moves: the others would give all to one slot.
            let mut draw = wakeone_draw { tick: start, ..Default::default() };
            match policy {
                HASH => draw.hash = at,
                RANDOM => draw.random = at,
                _ => draw.tick += i,
            }
            counts[pick(&table, &draw).expect("one is good")] += 1;
        }
        // A round that is cut off is no unfairness of round-robin.
        if policy != ROUND_ROBIN || given.weight(&given.eligible(false)) <= PICKS / 200 {
            assert_by_weight(&given, &counts);
        }
    }

    #[test]
    fn round_robin_is_exact_over_each_cycle(
        given in prop_oneof![weighted_group(1..=300, 8), weighted_group(1..=3, MAX_SLOTS)],
        start in 0..u64::MAX / 2,
    ) {
        let table = given.table(ROUND_ROBIN);
        let mut counts = vec![0; given.slots.len()];
        for tick in start..start + given.weight(&given.eligible(false)) {
            counts[pick(&table, &wakeone_draw { tick, ..Default::default() }).expect("one is good")] += 1;
        }
        let expected: Vec<u32> = given
            .slots
            .iter()
            .map(|slot| if expected_tier(slot, false) == TIER_GOOD { slot.weight } else { 0 })
            .collect();
        prop_assert_eq!(counts, expected);
    }

    /// Least connections with none closing is the highest-averages method of D'Hondt: exact where the shares are
    /// whole numbers, and never more than the fraction below them elsewhere.
    #[test]
    fn open_connections_stand_as_the_weights(
        given in prop_oneof![weighted_group(1..=100, 8), weighted_group(1..=9, WINDOW)],
        rounds in 1..=3_u64,
        more in 0..1000_u64,
        seed in any::<u64>(),
    ) {
        let eligible = given.eligible(false);
        let total = given.weight(&eligible);
        let (mut table, mut chance) = (given.table(LEAST_CONNECTIONS), StdRng::seed_from_u64(seed));
        for _ in 0..rounds * total {
            let slot = pick(&table, &random_draw(&mut chance)).expect("one is good");
            table.slot[slot].active += 1;
        }
        for (i, slot) in given.slots.iter().enumerate() {
            let expected = if eligible.contains(&i) { rounds * u64::from(slot.weight) } else { 0 };
            prop_assert_eq!(table.slot[i].active, expected as i64, "slot {}", i);
        }
        for _ in 0..more {
            let slot = pick(&table, &random_draw(&mut chance)).expect("one is good");
            table.slot[slot].active += 1;
        }
        for &i in &eligible {
            let least = (rounds * total + more) * u64::from(given.slots[i].weight) / total;
            prop_assert!(table.slot[i].active >= least as i64, "slot {i}: {} < {least}", table.slot[i].active);
        }
    }
}

#[test]
fn chance_draws_by_weight_too() {
    // A share that chance gives has a deviation of up to 0.16 % of all picks here: one per cent of all is six of them.
    let weights = [1, 2, 3, 4, 10];
    let given = Given::new(weights.map(|weight| up(weight, 0)).to_vec());
    let (table, mut chance) = (given.table(RANDOM), StdRng::seed_from_u64(20));
    let mut counts = [0_u64; 5];
    for _ in 0..PICKS {
        counts[pick(&table, &random_draw(&mut chance)).expect("all are up")] += 1;
    }
    for (weight, count) in weights.into_iter().zip(counts) {
        let (share, expected) = (count as f64 / PICKS as f64, f64::from(weight) / 20.0);
        assert!(
            (share - expected).abs() < 0.01,
            "{counts:?} for weights {weights:?}"
        );
    }
}

// ---- cpu --------------------------------------------------------------------

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn a_cpu_has_its_slot(given in any_group(), draw in any_draw()) {
        let own = draw.cpu as usize % given.slots.len();
        let chosen = pick(&given.table(CPU), &draw);
        if given.eligible(draw.agent_gone == 1).contains(&own) {
            prop_assert_eq!(chosen, Some(own));
        } else {
            // Its slot is no choice: then the one that chance gives, which every_choice_is_of_the_best_tier judges.
            prop_assert_eq!(chosen, pick(&given.table(RANDOM), &draw));
        }
    }
}

#[test]
fn each_of_256_cpus_has_the_slot_of_its_number() {
    let on_cpu = |given: &Given, cpu: usize| {
        let draw = wakeone_draw {
            cpu: cpu as u32,
            ..Default::default()
        };
        pick(&given.table(CPU), &draw)
    };
    let (idle, gone) = (up(1, 0), wakeone_slot::default());
    for cpu in 0..MAX_SLOTS {
        // All others have to be told from it, wherever their marks are kept.
        let mut without = Given::new(vec![idle; MAX_SLOTS]);
        without.slots[cpu] = gone;
        assert_ne!(on_cpu(&without, cpu), Some(cpu));
        let mut two = Given::new(vec![gone; MAX_SLOTS]);
        (two.slots[cpu], two.slots[cpu ^ 1]) = (idle, idle);
        assert_eq!(on_cpu(&two, cpu), Some(cpu));
        assert_eq!(on_cpu(&two, cpu ^ 1), Some(cpu ^ 1));
    }
}

#[test]
fn a_cpu_without_a_slot_gives_to_all_others() {
    let mut given = Given::new(vec![up(1, 0); 8]);
    given.slots[3].flags = UP | DRAINING;
    let (table, mut chance) = (given.table(CPU), StdRng::seed_from_u64(3));
    let mut counts = [0_u64; 8];
    for _ in 0..400 * 8 {
        let draw = wakeone_draw {
            cpu: 3 + 8,
            ..random_draw(&mut chance)
        };
        counts[pick(&table, &draw).expect("7 are good")] += 1;
    }
    assert_eq!(counts[3], 0);
    let others: Vec<u64> = (0..8).filter(|&i| i != 3).map(|i| counts[i]).collect();
    assert_even(&others);
}

// ---- a flow keeps its slot --------------------------------------------------

fn slot_of_flow(table: &wakeone_table, hash: u32) -> Option<usize> {
    let draw = wakeone_draw {
        hash,
        ..Default::default()
    };
    pick(table, &draw)
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn a_slot_that_goes_or_comes_moves_its_own_flows_only(
        given in weighted_group(1..=10, 40),
        at in any::<prop::sample::Index>(),
        seed in any::<u64>(),
    ) {
        let good = given.with_tier(TIER_GOOD, false);
        prop_assume!(good.len() > 1);
        let gone = good[at.index(good.len())];
        let mut without = given.clone();
        without.slots[gone].flags = 0;
        let (with, without) = (given.table(CONSISTENT), without.table(CONSISTENT));
        let mut chance = StdRng::seed_from_u64(seed);
        for _ in 0..500 {
            let flow = chance.next_u32();
            let (before, after) = (slot_of_flow(&with, flow), slot_of_flow(&without, flow));
            prop_assert_ne!(after, Some(gone));
            if before != Some(gone) {
                prop_assert_eq!(before, after, "a flow of another slot moved");
            }
        }
    }

    #[test]
    fn a_group_that_grows_takes_flows_for_the_new_slot_only(
        given in weighted_group(1..=10, 40),
        weight in 1..=10_u32,
        seed in any::<u64>(),
    ) {
        let mut grown = given.clone();
        grown.slots.push(up(weight, 0));
        let new = grown.slots.len() - 1;
        let (before, after) = (given.table(CONSISTENT), grown.table(CONSISTENT));
        let mut chance = StdRng::seed_from_u64(seed);
        for _ in 0..500 {
            let flow = chance.next_u32();
            let (old, now) = (slot_of_flow(&before, flow), slot_of_flow(&after, flow));
            prop_assert!(now == old || now == Some(new), "{old:?} -> {now:?}");
        }
    }
}

#[test]
fn consistent_gives_each_slot_its_weight_and_each_equal_as_much() {
    let table = Given::new(vec![up(1, 0); 7]).table(CONSISTENT);
    let mut counts = vec![0; 7];
    for i in 0..PICKS {
        counts[slot_of_flow(&table, even(i, PICKS)).expect("a slot is up")] += 1;
    }
    assert_even(&counts);

    let weights = [1, 2, 5, 8, 100];
    let table = Given::new(weights.map(|weight| up(weight, 0)).to_vec()).table(CONSISTENT);
    let mut counts = [0_u64; 5];
    for i in 0..10 * PICKS {
        counts[slot_of_flow(&table, even(i, 10 * PICKS)).expect("a slot is up")] += 1;
    }
    for (count, weight) in counts.into_iter().zip(weights) {
        // The logarithm's approximation may cost two hundredths; chance adds one to the rarest.
        let share = count as f64 / (10 * PICKS) as f64 * 116.0 / f64::from(weight);
        assert!((share - 1.0).abs() < 0.05, "weight {weight}: {share}");
    }
}

/// Chooses so often in a group whose connections are not counted yet, and returns how often each slot was chosen. The times
/// between are drawn, and some are none.
fn in_turn(table: &mut wakeone_table, now: &mut u32, picks: u32, chance: &mut StdRng) -> Vec<u32> {
    table.flags |= DEFERS;
    let mut counts = vec![0; table.slots as usize];
    for _ in 0..picks {
        *now = now.wrapping_add(1 + chance.next_u32() % 50);
        let draw = wakeone_draw {
            now: *now,
            ..random_draw(chance)
        };
        let slot = pick(table, &draw).expect("one is good");
        assert_eq!(pick_in_place(table, &draw), Some(slot));
        table.slot[slot].chosen = *now;
        counts[slot] += 1;
    }
    counts
}

#[test]
fn connections_that_are_not_counted_yet_are_spread_in_turn_over_any_set() {
    let mut chance = StdRng::seed_from_u64(29);
    for policy in [LEAST_CONNECTIONS, SHORTEST_QUEUE] {
        for slots in [2, 3, 4, 7, 16] {
            // Time overflows in the middle.
            let mut now = u32::MAX - 2000;
            let mut table = Given::new(vec![up(1, 0); slots]).table(policy);
            // Behind a gap, too: some are not equally short.
            let mut short: Vec<usize> = (0..slots).collect();
            for slot in (0..slots).filter(|slot| slot % 3 == 1 && slots > 3) {
                (table.slot[slot].active, table.slot[slot].queued) = (1, 1);
                short.retain(|one| *one != slot);
            }
            let rounds = 16;
            let picks = (rounds * short.len()) as u32;
            let counts = in_turn(&mut table, &mut now, picks, &mut chance);
            for slot in 0..slots {
                let fair = if short.contains(&slot) {
                    rounds as u32
                } else {
                    0
                };
                assert!(counts[slot].abs_diff(fair) <= 1, "{slots}: {counts:?}");
            }
            // One that was away for long gets its share, and does not catch up.
            table.slot[0].flags |= DRAINING;
            publish(&mut table);
            in_turn(&mut table, &mut now, 10_000, &mut chance);
            table.slot[0].flags &= !DRAINING;
            publish(&mut table);
            let back = in_turn(&mut table, &mut now, picks, &mut chance);
            assert!(back[0].abs_diff(rounds as u32) <= 1, "{slots}: {back:?}");
        }
    }
}

#[test]
fn of_busy_slots_one_that_made_progress_since_it_was_chosen_comes_first() {
    let mut chance = StdRng::seed_from_u64(30);
    let mut now = 10_000;
    let mut table = Given::new(vec![up(1, 5); 4]).table(LEAST_CONNECTIONS);
    for (slot, progress) in [(0, 100), (1, 300), (2, 200)] {
        table.slot[slot].progress = progress;
    }
    // The latest progress first; one of which none is known last; and then by turns.
    assert_eq!(in_turn(&mut table, &mut now, 1, &mut chance), [0, 1, 0, 0]);
    assert_eq!(in_turn(&mut table, &mut now, 1, &mut chance), [0, 0, 1, 0]);
    assert_eq!(in_turn(&mut table, &mut now, 2, &mut chance), [1, 0, 0, 1]);
    assert_eq!(in_turn(&mut table, &mut now, 64, &mut chance), [16; 4]);
    table.slot[3].progress = now + 1;
    now += 2;
    assert_eq!(in_turn(&mut table, &mut now, 1, &mut chance), [0, 0, 0, 1]);
}

#[test]
fn turns_tell_microseconds_apart_and_last_for_seconds() {
    // Of two slots with one load: their progress, when they were chosen, the time now.
    let cases = [
        (0, [0, 0], [1000, 999], 2000, "chosen a moment longer ago"),
        (
            0,
            [0, 0],
            [2_199_000, 102_843],
            2_200_000,
            "2^21 microseconds and a few ago",
        ),
        (1, [2, 3], [1, 1], 10, "with progress a moment later"),
        (
            1,
            [0, 1],
            [u32::MAX, 0],
            10,
            "one connection, the least time of progress",
        ),
    ];
    for (active, progress, chosen, now, what) in cases {
        let slot = |slot: usize| wakeone_slot {
            progress: progress[slot],
            chosen: chosen[slot],
            ..up(1, active)
        };
        let mut table = Given::new(vec![slot(0), slot(1)]).table(LEAST_CONNECTIONS);
        table.flags |= DEFERS;
        let draw = wakeone_draw {
            now,
            ..Default::default()
        };
        assert_eq!(pick(&table, &draw), Some(1), "{what}");
    }
}
