//! Which CPUs a thread, and what it starts, may use.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::error::Error;

/// The calling thread.
const SELF: Pid = Pid::from_raw(0);

/// How many CPUs an experiment can use; 1 where the system does not say.
pub fn count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The CPUs that this thread may use, rising.
///
/// # Errors
/// When the kernel does not say.
pub fn mine() -> Result<Vec<usize>, Error> {
    let set = asked()?;
    let all = 0..CpuSet::count();
    Ok(all
        .filter(|cpu| set.is_set(*cpu).unwrap_or(false))
        .collect())
}

fn asked() -> Result<CpuSet, Error> {
    sched_getaffinity(SELF).map_err(|e| Error::Missing(format!("asking for our CPUs failed: {e}")))
}

/// Keeps this thread, and all threads and processes that it starts from now on, on one CPU.
///
/// # Errors
/// When the kernel refuses.
pub fn pin(cpu: usize) -> Result<(), Error> {
    let mut set = CpuSet::new();
    set.set(cpu)
        .and_then(|()| sched_setaffinity(SELF, &set))
        .map_err(|e| Error::Missing(format!("pinning a thread to CPU {cpu} failed: {e}")))
}

/// A CPU for a server and one for its clients. This imitates two machines of one processor each. On a machine with one
/// CPU they share it. Dropping this gives the thread its CPUs back.
#[derive(Debug)]
pub struct Apart {
    before: CpuSet,
    cpus: Vec<usize>,
}

impl Apart {
    /// Reads which CPUs there are. It pins nothing yet.
    ///
    /// # Errors
    /// When the kernel does not say which CPUs there are.
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            before: asked()?,
            cpus: mine()?,
        })
    }

    /// Whether there is a CPU for each.
    pub fn possible(&self) -> bool {
        self.cpus.len() > 1
    }

    /// Pins this thread, and all that it starts from now on, to the server's CPU.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn server(&self) -> Result<(), Error> {
        self.pin(0)
    }

    /// Pins this thread, and all that it starts from now on, to the clients' CPU.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn client(&self) -> Result<(), Error> {
        self.pin(1)
    }

    fn pin(&self, place: usize) -> Result<(), Error> {
        match self.cpus.get(place) {
            Some(cpu) if self.possible() => pin(*cpu),
            _ => Ok(()),
        }
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        // The kernel allowed this set before.
        let _ = sched_setaffinity(SELF, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apart_and_together_again() {
        let all = mine().unwrap();
        let apart = Apart::new().unwrap();
        if apart.possible() {
            apart.server().unwrap();
            assert_eq!(mine().unwrap(), all[..1]);
            let child = std::thread::spawn(|| mine().unwrap()).join().unwrap();
            assert_eq!(child, all[..1], "what is started inherits it");
            apart.client().unwrap();
            assert_eq!(mine().unwrap(), all[1..2]);
        }
        drop(apart);
        assert_eq!(mine().unwrap(), all);
    }
}
