//! A group in memory for the simulator: the same policies as in the kernel, for more slots or with another tie-break
//! (`policy_group.c`).

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::c_void;
use std::ptr::NonNull;

use crate::contract::wakeone_draw;

/// The mirror of `struct wakeone_group_functions`.
#[repr(C)]
struct Functions {
    size: u64,
    slots: u64,
    begin: unsafe extern "C" fn(*mut c_void, u32, u32),
    set: unsafe extern "C" fn(*mut c_void, u32, u32, u32),
    publish: unsafe extern "C" fn(*mut c_void),
    pick: unsafe extern "C" fn(*mut c_void, *const wakeone_draw) -> i32,
    enter: unsafe extern "C" fn(*mut c_void, u32, u64),
    leave: unsafe extern "C" fn(*mut c_void, u32, u64),
    move_away: unsafe extern "C" fn(*mut c_void, u32),
    queued: unsafe extern "C" fn(*mut c_void, u32, u32),
    active: unsafe extern "C" fn(*const c_void, u32) -> i64,
    selected: unsafe extern "C" fn(*const c_void, u32) -> u64,
}

unsafe extern "C" {
    static wakeone_group: Functions;
    static wakeone_group_chance: Functions;
    static wakeone_group_wide: Functions;
    static wakeone_group_wide_16: Functions;
    static wakeone_group_wide_8: Functions;
    static wakeone_group_wide_4: Functions;
}

/// How the policies are compiled for a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Variant {
    /// As in the kernel: at most 256 slots.
    #[default]
    Kernel,
    /// As in the kernel, but chance breaks the ties of busy slots too.
    Chance,
    /// At most 1,024 slots.
    Wide,
    /// At most 1,024 slots, of which least-connections looks at 16 for one choice.
    Window16,
    /// At most 1,024 slots, of which least-connections looks at 8 for one choice.
    Window8,
    /// At most 1,024 slots, of which least-connections looks at 4 for one choice.
    Window4,
}

impl Variant {
    fn functions(self) -> &'static Functions {
        // SAFETY: constants of policy_group.c, of the layout that `Functions` mirrors.
        unsafe {
            match self {
                Self::Kernel => &wakeone_group,
                Self::Chance => &wakeone_group_chance,
                Self::Wide => &wakeone_group_wide,
                Self::Window16 => &wakeone_group_wide_16,
                Self::Window8 => &wakeone_group_wide_8,
                Self::Window4 => &wakeone_group_wide_4,
            }
        }
    }

    /// The most slots of a group.
    pub fn slots(self) -> usize {
        self.functions().slots as usize
    }
}

/// The most slots of any variant.
pub const MOST_SLOTS: usize = 1024;

/// A group that one thread uses.
pub struct Group {
    functions: &'static Functions,
    table: NonNull<c_void>,
    layout: Layout,
    slots: u32,
}

// SAFETY: the table is owned by the group alone.
unsafe impl Send for Group {}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.table.as_ptr().cast(), self.layout) }
    }
}

impl Group {
    /// A group whose slots are all down. `policy`: of `enum wakeone_policy`.
    ///
    /// # Panics
    /// For no slot, or more than the variant has room for.
    pub fn new(variant: Variant, policy: u32, slots: usize) -> Self {
        let functions = variant.functions();
        assert!((1..=variant.slots()).contains(&slots), "{slots} slots");
        // Slots are aligned to 128 bytes.
        let layout = Layout::from_size_align(functions.size as usize, 128)
            .unwrap_or_else(|error| unreachable!("a table of {} bytes: {error}", functions.size));
        // SAFETY: a table has more than 0 bytes.
        let table = NonNull::new(unsafe { alloc_zeroed(layout) })
            .unwrap_or_else(|| handle_alloc_error(layout))
            .cast();
        let slots = slots as u32;
        // SAFETY: `table` has the size and the alignment that this variant's functions expect.
        unsafe { (functions.begin)(table.as_ptr(), policy, slots) };
        Self {
            functions,
            table,
            layout,
            slots,
        }
    }

    fn checked(&self, slot: usize) -> u32 {
        assert!(slot < self.slots as usize, "slot {slot} of {}", self.slots);
        slot as u32
    }

    /// Sets a slot's flags (see [`crate::table::flag`]) and weight. They count from [`Group::publish`] on.
    ///
    /// # Panics
    /// Like every function here, for a slot that the group does not have.
    pub fn set(&mut self, slot: usize, flags: u32, weight: u32) {
        let slot = self.checked(slot);
        // SAFETY: the table is whole and ours alone, and the slot is one of it.
        unsafe { (self.functions.set)(self.table.as_ptr(), slot, flags, weight) }
    }

    /// Lists the slots that may be chosen, after a change of flags or weights.
    pub fn publish(&mut self) {
        // SAFETY: the table is whole and ours alone.
        unsafe { (self.functions.publish)(self.table.as_ptr()) }
    }

    /// The slot for a connection; none where no slot is up. Counts the choice.
    pub fn pick(&mut self, draw: &wakeone_draw) -> Option<usize> {
        // SAFETY: the table is whole and ours alone; the draw is read only.
        let slot = unsafe { (self.functions.pick)(self.table.as_ptr(), draw) };
        usize::try_from(slot).ok()
    }

    /// Counts a connection in. It is progress where none was open.
    pub fn enter(&mut self, slot: usize, now_ns: u64) {
        let slot = self.checked(slot);
        // SAFETY: as in `set`.
        unsafe { (self.functions.enter)(self.table.as_ptr(), slot, now_ns) }
    }

    /// Counts a connection out, which is progress.
    pub fn leave(&mut self, slot: usize, now_ns: u64) {
        let slot = self.checked(slot);
        // SAFETY: as in `set`.
        unsafe { (self.functions.leave)(self.table.as_ptr(), slot, now_ns) }
    }

    /// Counts a connection out that leaves for another slot.
    pub fn move_away(&mut self, slot: usize) {
        let slot = self.checked(slot);
        // SAFETY: as in `set`.
        unsafe { (self.functions.move_away)(self.table.as_ptr(), slot) }
    }

    /// So many connections wait at a slot.
    pub fn set_queued(&mut self, slot: usize, length: u32) {
        let slot = self.checked(slot);
        // SAFETY: as in `set`.
        unsafe { (self.functions.queued)(self.table.as_ptr(), slot, length) }
    }

    /// Open connections of a slot.
    pub fn active(&self, slot: usize) -> u64 {
        let slot = self.checked(slot);
        // SAFETY: as in `set`; the function only reads.
        let active = unsafe { (self.functions.active)(self.table.as_ptr(), slot) };
        u64::try_from(active).unwrap_or(0)
    }

    /// How often a slot was chosen.
    pub fn selected(&self, slot: usize) -> u64 {
        let slot = self.checked(slot);
        // SAFETY: as in `set`; the function only reads.
        unsafe { (self.functions.selected)(self.table.as_ptr(), slot) }
    }
}
