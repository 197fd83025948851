//! The state of the view, and how keys change it.

use std::collections::VecDeque;

use crate::frame::{Frame, Place, SlotLook, Steering};
use crate::table::{self, Column, FORMS, Line, Table};

/// Refreshes remembered for the charts: as many as the widest terminal shows.
const MOST_REFRESHES: usize = 512;

/// A key, without the terminal that it was pressed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// A letter or sign.
    Char(char),
    /// To the next listener.
    Tab,
    /// To the one before.
    BackTab,
    /// Up one row.
    Up,
    /// Down one row.
    Down,
    /// Yes.
    Enter,
    /// Back.
    Escape,
    /// The key that ends programs: Ctrl-C.
    Interrupt,
}

/// A request of a key to the world outside of the view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// To end.
    Quit,
    /// To steer a group by another policy.
    ChangePolicy(Change),
    /// To give slots no new connections, or to give them some again.
    Drain {
        /// The group.
        group: String,
        /// The slots of the worker selected.
        slots: Vec<u32>,
        /// Whether they drain from now on.
        on: bool,
    },
    /// To move the queues of slots to others now.
    Rescue {
        /// The group.
        group: String,
        /// The slots of the worker selected.
        slots: Vec<u32>,
    },
}

/// Another policy for a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The group.
    pub group: String,
    /// Its policy now.
    pub from: Option<String>,
    /// The other one.
    pub to: String,
}

/// The source of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// From a kernel.
    Live,
    /// From a recording; nothing can be steered.
    Replay,
}

/// A listener with its history.
#[derive(Debug, Clone)]
pub struct Show {
    /// The refresh shown.
    pub frame: Frame,
    /// Its steering at the refresh before.
    pub before: Option<Steering>,
    /// One entry for each refresh, the newest first.
    pub history: VecDeque<Moment>,
}

/// One refresh in the charts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moment {
    /// Connections a second.
    pub rate: u64,
    /// Connections that wait; bytes of UDP.
    pub queued: u64,
    /// The wait so far of the oldest of them, ms.
    pub oldest_ms: u64,
    /// Connections dropped since the refresh before.
    pub dropped: u64,
    /// Connections that were moved to other workers since then.
    pub moved: u64,
}

impl Show {
    fn new(frame: Frame) -> Self {
        let mut show = Self {
            frame,
            before: None,
            history: VecDeque::new(),
        };
        show.note();
        show
    }

    /// Remembers the refresh for the charts.
    fn note(&mut self) {
        self.history.truncate(MOST_REFRESHES - 1);
        let watch = &self.frame.watch;
        let totals = watch.totals();
        let queues = watch.queues();
        let rescued = |steering: &Steering| {
            let slots = steering.slots.iter();
            slots.fold(0_u64, |sum, slot| sum.saturating_add(slot.rescued))
        };
        let moved = match (&self.frame.steering, &self.before) {
            (Some(now), Some(before)) => rescued(now).saturating_sub(rescued(before)),
            _ => 0,
        };
        self.history.push_front(Moment {
            rate: totals.connections_per_s.round() as u64,
            queued: queues.iter().map(|queue| u64::from(queue.length)).sum(),
            oldest_ms: (totals.oldest_wait_us.unwrap_or(0.0) / 1000.0) as u64,
            dropped: totals.dropped,
            moved,
        });
    }

    fn show(&mut self, frame: Frame) {
        let earlier = std::mem::replace(&mut self.frame, frame);
        self.before = earlier.steering;
        self.note();
    }
}

/// All that is shown.
#[derive(Debug, Clone)]
pub struct State {
    /// The source of the frames.
    pub source: Source,
    /// The listeners.
    pub shows: Vec<Show>,
    /// The listener shown, by its place in `shows`.
    pub tab: usize,
    /// The column that rows are sorted by.
    pub sort: Column,
    /// Whether the order is reversed.
    pub reversed: bool,
    /// The worker selected.
    pub selected: Option<u32>,
    /// New refreshes are not shown.
    pub paused: bool,
    /// The keys are explained.
    pub help: bool,
    /// The result of the last key.
    pub notice: Option<String>,
    /// All policies.
    pub policies: Vec<String>,
    /// A policy that was chosen and is not in force until it is confirmed.
    pub choice: Option<Change>,
    /// The change that takes the last change of a policy back.
    pub undo: Option<Change>,
}

impl State {
    /// A state without any listener.
    pub fn new(source: Source) -> Self {
        Self {
            source,
            shows: Vec::new(),
            tab: 0,
            sort: Column::Pid,
            reversed: false,
            selected: None,
            paused: false,
            help: false,
            notice: None,
            policies: Vec::new(),
            choice: None,
            undo: None,
        }
    }

    /// Takes in a refresh, unless it is paused. A listener that is not in it stays as it was.
    pub fn refresh(&mut self, frames: Vec<Frame>) {
        if self.paused && !self.shows.is_empty() {
            return;
        }
        for frame in frames {
            let place: Place = frame.place();
            match self.shows.iter_mut().find(|s| s.frame.place() == place) {
                Some(show) => show.show(frame),
                None => self.shows.push(Show::new(frame)),
            }
        }
        let workers = self.current().map(|show| &show.frame.watch.last.workers);
        let lives = |pid: &u32| workers.is_some_and(|workers| workers.contains_key(pid));
        self.selected = self.selected.filter(lives);
    }

    /// The listener looked at.
    pub fn current(&self) -> Option<&Show> {
        self.shows.get(self.tab)
    }

    /// How it is steered.
    pub fn steering(&self) -> Option<&Steering> {
        self.current()?.frame.steering.as_ref()
    }

    /// Its table, sorted.
    pub fn table(&self) -> Option<Table> {
        let show = self.current()?;
        let mut table = table::table(&show.frame, show.before.as_ref());
        table::sort(&mut table.lines, self.sort, self.reversed);
        Some(table)
    }

    /// Handles a key; returns the action that it requests of others.
    pub fn press(&mut self, key: Key) -> Option<Action> {
        self.notice = None;
        if let Some(choice) = self.choice.take() {
            return self.decide(choice, key);
        }
        let help = std::mem::take(&mut self.help);
        match key {
            Key::Interrupt | Key::Char('q') => return Some(Action::Quit),
            Key::Char('?' | 'h') => self.help = !help,
            Key::Char('p' | ' ') => self.paused = !self.paused,
            Key::Char('s') => self.sort = self.next_column(),
            Key::Char('r') => self.reversed = !self.reversed,
            Key::Tab => self.turn(1),
            Key::BackTab => self.turn(self.shows.len().saturating_sub(1)),
            Key::Down | Key::Char('j') => self.select(1),
            Key::Up | Key::Char('k') => self.select(-1),
            Key::Escape => self.selected = None,
            Key::Char('c') => self.choose_policy(),
            Key::Char('u') => return self.told(Self::take_back),
            Key::Char('d') => return self.told(Self::drain),
            Key::Char('m') => return self.told(Self::rescue),
            Key::Char(_) | Key::Enter => {}
        }
        None
    }

    /// Decides on a chosen policy: a policy of a server in production changes only after a
    /// confirmation.
    fn decide(&mut self, choice: Change, key: Key) -> Option<Action> {
        match key {
            Key::Interrupt => return Some(Action::Quit),
            Key::Enter | Key::Char('y') => return Some(Action::ChangePolicy(choice)),
            Key::Char('c') => self.choice = Some(self.after(choice)),
            _ => {
                let stays = choice.from.as_deref().unwrap_or("as it is");
                self.notice = Some(format!("the policy of {} stays {stays}", choice.group));
            }
        }
        None
    }

    /// The same with the policy after it; never the one that is in force.
    fn after(&self, change: Change) -> Change {
        let at = self.policies.iter().position(|name| *name == change.to);
        let others = self.policies.iter().cycle().skip(at.map_or(0, |at| at + 1));
        let mut others = others.take(self.policies.len());
        let next = others.find(|name| Some(*name) != change.from.as_ref());
        Change {
            to: next.unwrap_or(&change.to).clone(),
            ..change
        }
    }

    /// Notes that a policy was changed, so that it can be taken back.
    pub fn changed(&mut self, change: &Change) {
        self.undo = change.from.clone().map(|before| Change {
            group: change.group.clone(),
            from: Some(change.to.clone()),
            to: before,
        });
        if let Some(undo) = &self.undo {
            self.notice = Some(format!(
                "{}: {} from the next connection on; u goes back to {}",
                change.group, change.to, undo.to
            ));
        }
    }

    fn next_column(&self) -> Column {
        let steered = self.steering().is_some();
        let at = FORMS.iter().position(|f| f.column == self.sort);
        let after = FORMS.iter().cycle().skip(at.map_or(0, |at| at + 1));
        let mut shown = after.filter(|f| steered || !f.steered());
        shown.next().map_or(Column::Pid, |f| f.column)
    }

    fn turn(&mut self, by: usize) {
        self.tab = (self.tab + by) % self.shows.len().max(1);
        self.selected = None;
    }

    fn select(&mut self, by: isize) {
        let lines: Vec<Line> = self.table().map(|t| t.lines).unwrap_or_default();
        let at = lines.iter().position(|l| Some(l.row.pid) == self.selected);
        let next = match at {
            Some(at) => at.saturating_add_signed(by).min(lines.len() - 1),
            None if by > 0 => 0,
            None => lines.len().saturating_sub(1),
        };
        self.selected = lines.get(next).map(|l| l.row.pid);
    }

    /// The group that keys may change, or why there is none.
    fn steerable(&self) -> Result<&Steering, &'static str> {
        match (self.source, self.steering()) {
            (Source::Replay, _) => Err("a recording can only be looked at"),
            (_, None) => Err("wakeone does not steer this listener; see `wakeone attach --help`"),
            (_, Some(steering)) => Ok(steering),
        }
    }

    fn choose_policy(&mut self) {
        match self.steerable() {
            Ok(steering) => {
                let now = steering.policy.clone();
                let change = Change {
                    group: steering.group.clone(),
                    from: now.clone(),
                    to: now.unwrap_or_default(),
                };
                self.choice = Some(self.after(change));
            }
            Err(why) => self.notice = Some(why.into()),
        }
    }

    fn take_back(&self) -> Result<Action, &'static str> {
        let group = &self.steerable()?.group;
        let undo = self.undo.as_ref().filter(|undo| undo.group == *group);
        let undo = undo.ok_or("no policy was changed here that could be taken back")?;
        Ok(Action::ChangePolicy(undo.clone()))
    }

    /// Returns the action of a key; where there is none, the notice tells why.
    fn told(&mut self, key: fn(&Self) -> Result<Action, &'static str>) -> Option<Action> {
        match key(self) {
            Ok(action) => Some(action),
            Err(why) => {
                self.notice = Some(why.into());
                None
            }
        }
    }

    /// The steered group, and those of its slots that are the selected worker's.
    fn selected_slots(&self) -> Result<(&Steering, Vec<&SlotLook>), &'static str> {
        let steering = self.steerable()?;
        let pid = self
            .selected
            .ok_or("select a worker first, with the arrow keys")?;
        let slots: Vec<&SlotLook> = steering.slots_of(pid).collect();
        if slots.is_empty() {
            return Err("this worker has no slot");
        }
        Ok((steering, slots))
    }

    fn drain(&self) -> Result<Action, &'static str> {
        let (steering, slots) = self.selected_slots()?;
        Ok(Action::Drain {
            group: steering.group.clone(),
            on: !slots.iter().any(|s| s.state == "draining"),
            slots: slots.iter().map(|s| s.slot).collect(),
        })
    }

    fn rescue(&self) -> Result<Action, &'static str> {
        let (steering, slots) = self.selected_slots()?;
        Ok(Action::Rescue {
            group: steering.group.clone(),
            slots: slots.iter().map(|s| s.slot).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    fn pids(state: &State) -> Vec<u32> {
        let table = state.table().expect("a table");
        table.lines.iter().map(|l| l.row.pid).collect()
    }

    fn sort_by(state: &mut State, column: Column) {
        for _ in 0..FORMS.len() {
            if state.sort == column {
                return;
            }
            state.press(Key::Char('s'));
        }
        panic!("{column:?} is never sorted by");
    }

    #[test]
    fn rows_are_sorted_by_any_column_and_back() {
        let mut state = State::new(Source::Live);
        let mut frame = fixtures::shared();
        frame
            .watch
            .last
            .workers
            .get_mut(&303)
            .expect("worker")
            .active = 5;
        state.refresh(vec![frame]);
        assert_eq!(pids(&state), [301, 302, 303]);
        sort_by(&mut state, Column::Active);
        assert_eq!(pids(&state), [301, 303, 302]);
        state.press(Key::Char('r'));
        assert_eq!(pids(&state), [302, 303, 301]);
        // 303 took nothing: its wait is not known, and that is last either way.
        sort_by(&mut state, Column::Wait);
        assert_eq!(pids(&state)[2], 303);
        state.press(Key::Char('r'));
        assert_eq!(pids(&state)[2], 303);
        sort_by(&mut state, Column::State);
        assert_eq!(pids(&state), [301, 303, 302]);
        sort_by(&mut state, Column::Pid);
    }

    #[test]
    fn paused_it_stays_as_it_is() {
        let mut state = State::new(Source::Live);
        state.refresh(vec![fixtures::shared()]);
        state.press(Key::Char('p'));
        let mut later = fixtures::shared();
        later.watch.last.workers.remove(&302);
        state.refresh(vec![later.clone()]);
        assert_eq!(pids(&state), [301, 302, 303]);
        state.press(Key::Char('p'));
        state.refresh(vec![later]);
        assert_eq!(pids(&state), [301, 303]);
        let rates = state.current().expect("shown").history.iter();
        assert_eq!(rates.map(|one| one.rate).collect::<Vec<_>>(), [800, 800]);
    }

    #[test]
    fn a_policy_is_changed_where_it_is_ours() {
        let mut state = State::new(Source::Live);
        state.refresh(vec![
            fixtures::shared(),
            fixtures::at(fixtures::steered(), 81),
        ]);
        assert_eq!(state.press(Key::Char('c')), None);
        assert!(
            state
                .notice
                .as_deref()
                .is_some_and(|n| n.contains("does not steer"))
        );
        state.press(Key::Tab);
        state.policies = ["hash", "least-connections", "two-choices"]
            .map(str::to_owned)
            .into();
        let to = |policy: &str| Change {
            group: "web".into(),
            from: Some("least-connections".into()),
            to: policy.into(),
        };
        // It is asked first, and any other key keeps it as it is.
        assert_eq!(state.press(Key::Char('c')), None);
        assert_eq!(state.choice, Some(to("two-choices")));
        assert_eq!(state.press(Key::Char('d')), None);
        assert_eq!(state.choice, None);
        assert_eq!(
            state.notice.as_deref(),
            Some("the policy of web stays least-connections")
        );
        state.press(Key::Char('c'));
        state.press(Key::Char('c'));
        assert_eq!(state.choice, Some(to("hash")));
        let action = state.press(Key::Enter);
        assert_eq!(action, Some(Action::ChangePolicy(to("hash"))));
        // Before it was done there is nothing to take back.
        assert_eq!(state.press(Key::Char('u')), None);
        state.changed(&to("hash"));
        assert_eq!(
            state.notice.as_deref(),
            Some("web: hash from the next connection on; u goes back to least-connections")
        );
        assert_eq!(
            state.press(Key::Char('u')),
            Some(Action::ChangePolicy(Change {
                group: "web".into(),
                from: Some("hash".into()),
                to: "least-connections".into(),
            }))
        );
        state.source = Source::Replay;
        assert_eq!(state.press(Key::Char('c')), None);
        assert_eq!(
            state.notice.as_deref(),
            Some("a recording can only be looked at")
        );
    }

    #[test]
    fn the_slot_of_the_worker_selected_drains_and_ends_it() {
        let mut state = State::new(Source::Live);
        state.refresh(vec![fixtures::steered()]);
        assert_eq!(state.press(Key::Char('d')), None, "none is selected");
        state.press(Key::Down);
        state.press(Key::Down);
        assert_eq!(state.selected, Some(402));
        let drain = |slot, on| Action::Drain {
            group: "web".into(),
            slots: vec![slot],
            on,
        };
        assert_eq!(state.press(Key::Char('d')), Some(drain(1, true)));
        state.press(Key::Down);
        assert_eq!(state.press(Key::Char('d')), Some(drain(2, false)));
        assert_eq!(
            state.press(Key::Char('m')),
            Some(Action::Rescue {
                group: "web".into(),
                slots: vec![2]
            })
        );
        // Once its worker is gone, nothing is selected.
        let mut later = fixtures::steered();
        later.watch.last.workers.remove(&403);
        state.refresh(vec![later]);
        assert_eq!(state.selected, None);
    }

    #[test]
    fn ctrl_c_and_q_end_it() {
        let mut state = State::new(Source::Live);
        assert_eq!(state.press(Key::Interrupt), Some(Action::Quit));
        assert_eq!(state.press(Key::Char('q')), Some(Action::Quit));
    }
}
