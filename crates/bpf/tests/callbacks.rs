//! The counting program beside another that wants to hear of every state of the same connections. Needs root.

#![allow(unsafe_code)]

use std::fs::File;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use libbpf_rs::libbpf_sys::{self, bpf_insn};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use wakeone_bpf::bpffs;
use wakeone_bpf::run_stats::instruction;
use wakeone_bpf::table::COUNTED;
use wakeone_bpf::{self as bpf, LoadPlan, Pinned};
use wakeone_kernel::capability;
use wakeone_kernel::cgroup;
use wakeone_kernel::netns;

const TCP_CLOSE: i32 = 7;

/// Another's program: has the states of each connection told, and counts those that end.
struct Other {
    ends: MapHandle,
    _program: OwnedFd,
    _link: OwnedFd,
}

impl Other {
    fn attach(cgroup: &Path) -> Self {
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as u64,
            ..Default::default()
        };
        let ends = MapHandle::create(MapType::Array, Some("ends"), 4, 8, 1, &options);
        let ends = ends.expect("a map");
        let program = load(&code(ends.as_fd().as_raw_fd()));
        let cgroup = File::open(cgroup).expect("cgroup");
        // SAFETY: both descriptors are open for as long as the call lasts, and no options are passed.
        let link = unsafe {
            libbpf_sys::bpf_link_create(
                program.as_raw_fd(),
                cgroup.as_raw_fd(),
                libbpf_sys::BPF_CGROUP_SOCK_OPS,
                std::ptr::null(),
            )
        };
        assert!(link >= 0, "bpf_link_create: {link}");
        Self {
            ends,
            _program: program,
            // SAFETY: the kernel has just made this descriptor for us.
            _link: unsafe { OwnedFd::from_raw_fd(link) },
        }
    }

    fn ends(&self) -> u64 {
        let value = self.ends.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY);
        let bytes = value.expect("lookup").expect("the first entry");
        u64::from_ne_bytes(bytes.try_into().expect("8 bytes"))
    }
}

fn code(map: i32) -> [bpf_insn; 21] {
    let established = libbpf_sys::BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB as i32;
    let state = libbpf_sys::BPF_SOCK_OPS_STATE_CB as i32;
    let told = libbpf_sys::BPF_SOCK_OPS_STATE_CB_FLAG as i32;
    [
        instruction(0xbf, 6, 1, 0, 0),           // r6 = ctx
        instruction(0x61, 2, 1, 0, 0),           // r2 = ctx->op
        instruction(0x55, 2, 0, 4, established), // another one: 4 on
        instruction(0xb7, 2, 0, 0, told),        // r2 = the flag
        instruction(0x85, 0, 0, 0, 59),          // bpf_sock_ops_cb_flags_set
        instruction(0xb7, 0, 0, 0, 1),           // r0 = 1
        instruction(0x95, 0, 0, 0, 0),           // exit
        instruction(0x55, 2, 0, 11, state),      // another one: to the end
        instruction(0x61, 2, 6, 8, 0),           // r2 = ctx->args[1], the new state
        instruction(0x55, 2, 0, 9, TCP_CLOSE),   // another one: to the end
        instruction(0x62, 10, 0, -4, 0),         // *(u32 *)(fp - 4) = 0
        instruction(0x18, 1, 1, 0, map),         // r1 = the map,
        instruction(0, 0, 0, 0, 0),              // in two instructions
        instruction(0xbf, 2, 10, 0, 0),          // r2 = fp
        instruction(0x07, 2, 0, 0, -4),          // r2 -= 4
        instruction(0x85, 0, 0, 0, 1),           // bpf_map_lookup_elem
        instruction(0x15, 0, 0, 2, 0),           // none: to the end
        instruction(0xb7, 1, 0, 0, 1),           // r1 = 1
        instruction(0xdb, 0, 1, 0, 0),           // *(u64 *)r0 += r1, atomically
        instruction(0xb7, 0, 0, 0, 1),           // r0 = 1
        instruction(0x95, 0, 0, 0, 0),           // exit
    ]
}

fn load(code: &[bpf_insn]) -> OwnedFd {
    // SAFETY: the strings end with 0, `code` has the length that is given, and no options are passed.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SOCK_OPS,
            c"other".as_ptr(),
            c"GPL".as_ptr(),
            code.as_ptr(),
            code.len() as u64,
            std::ptr::null_mut(),
        )
    };
    assert!(fd >= 0, "bpf_prog_load: {fd}");
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A folder on a bpffs of the test's own, and a cgroup.
struct Ground {
    folder: tempfile::TempDir,
    cgroup: std::path::PathBuf,
}

impl Ground {
    fn new() -> Option<(Self, TcpListener)> {
        if !nix::unistd::geteuid().is_root() || !capability::missing().is_empty() {
            eprintln!("skipped: not root");
            return None;
        }
        let Ok(home) = cgroup::own() else {
            eprintln!("skipped: no cgroup2");
            return None;
        };
        netns::isolate().expect("a network namespace");
        let folder = tempfile::tempdir().expect("folder");
        bpffs::mount_at(folder.path()).expect("bpffs");
        let cgroup = home.join(format!("wakeone-callbacks-{}", std::process::id()));
        let bind = || TcpListener::bind("127.0.0.1:0").expect("listener");
        let (_, listener) = cgroup::create_sockets_in(&cgroup, bind).expect("cgroup");
        Some((Self { folder, cgroup }, listener))
    }

    fn count(&self, listener: &TcpListener) -> Pinned {
        let plan = LoadPlan {
            dir: &self.folder.path().join("group"),
            addresses: 1,
            cgroup: Some(&self.cgroup),
            read_queues: false,
            datagrams: false,
            quic: false,
            lookup: &[],
            joins: &[],
        };
        let loaded = bpf::load(&plan).expect("load");
        assert!(loaded.missing.is_empty(), "{:?}", loaded.missing);
        loaded.pinned.table().flags().store(COUNTED, Relaxed);
        loaded.pinned.know_listener(0, listener).expect("a slot");
        loaded.pinned
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        let _ = bpf::remove_pins(&self.folder.path().join("group"));
        let _ = bpffs::unmount(self.folder.path());
        let _ = cgroup::remove(&self.cgroup);
    }
}

/// A connection from its handshake to its end; the server closes first.
fn converse(listener: &TcpListener) {
    let mut client = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    drop(listener.accept().expect("accept"));
    assert_eq!(client.read(&mut [0]).expect("end of file"), 0);
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(10), "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The programs of a cgroup run in the order in which they were attached: ours is neither to be first nor last.
#[test]
fn another_program_hears_of_the_end_of_counted_connections() {
    for ours_first in [false, true] {
        let Some((ground, listener)) = Ground::new() else {
            return;
        };
        let (other, pinned);
        if ours_first {
            pinned = ground.count(&listener);
            other = Other::attach(&ground.cgroup);
        } else {
            other = Other::attach(&ground.cgroup);
            pinned = ground.count(&listener);
        }
        for _ in 0..5 {
            converse(&listener);
        }
        let slot = pinned.table().slot(0);
        eventually("all counted in and out", || {
            slot.established().load(Relaxed) == 5 && slot.closed().load(Relaxed) == 5
        });
        assert_eq!(slot.active().load(Relaxed), 0);
        // FIN_WAIT1 is not the last state: the other program wants to hear of CLOSE.
        eventually("the other program heard of each end", || other.ends() == 5);
    }
}
