//! Compiles the BPF program to a skeleton, and the policy once more natively.

use std::{
    env, fs,
    hash::{DefaultHasher, Hasher},
    path::{Path, PathBuf},
};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let bpf = root.join("../../bpf");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let arch_headers = env::var("CARGO_CFG_TARGET_ARCH").expect("set by cargo");
    for file in [
        "contract.h",
        "policy.h",
        "eligible.h",
        "maps.h",
        "iter.h",
        "choose.h",
        "count.h",
        "dispatch.bpf.c",
        "datagram.h",
        "datagram.bpf.c",
        "quic.h",
        "quic.bpf.c",
        "observe.h",
        "observe.bpf.c",
        "recount.bpf.c",
        "chooser.bpf.c",
        "locks.h",
        "locks.bpf.c",
        "lookup.bpf.c",
        "join.bpf.c",
        "bursts.h",
        "bursts.bpf.c",
    ] {
        println!("cargo:rerun-if-changed={}", bpf.join(file).display());
    }
    println!("cargo:rerun-if-changed=src/policy_native.c");

    for object in [
        "dispatch", "datagram", "quic", "lookup", "join", "observe", "recount", "chooser", "locks",
        "bursts",
    ] {
        compile(&bpf, object, &arch_headers, &out);
    }

    println!("cargo:rustc-env=WAKEONE_PROGRAMS={:x}", identity(&out));
    let headers =
        ["contract.h", "policy.h", "quic.h", "observe.h", "bursts.h"].map(|file| bpf.join(file));
    fs::write(out.join("contract.rs"), constants(&headers)).expect("OUT_DIR is writable");

    cc::Build::new()
        .file("src/policy_native.c")
        .include(&bpf)
        .warnings(true)
        .warnings_into_errors(true)
        .compile("wakeone_policy");
    compile_groups(&bpf);
}

/// The groups of the simulator (src/policy_group.rs): name, bits of a slot's number, window, whether chance
/// breaks all ties.
const GROUPS: [(&str, u32, u32, bool); 6] = [
    ("wakeone_group", 8, 32, false),
    ("wakeone_group_chance", 8, 32, true),
    ("wakeone_group_wide", 10, 32, false),
    ("wakeone_group_wide_16", 10, 16, false),
    ("wakeone_group_wide_8", 10, 8, false),
    ("wakeone_group_wide_4", 10, 4, false),
];

/// Compiles src/policy_group.c once for each of [`GROUPS`].
fn compile_groups(bpf: &Path) {
    println!("cargo:rerun-if-changed=src/policy_group.c");
    for (name, bits, window, chance) in GROUPS {
        let mut build = cc::Build::new();
        build
            .file("src/policy_group.c")
            .include(bpf)
            .define("WAKEONE_GROUP", name)
            .define("WAKEONE_SLOT_BITS", bits.to_string().as_str())
            .define("WAKEONE_ENTRY", if bits > 8 { "__u16" } else { "__u8" })
            .define("WAKEONE_WINDOW", window.to_string().as_str())
            .warnings(true)
            .warnings_into_errors(true);
        if chance {
            build.define("WAKEONE_TIES_BY_CHANCE", None);
        }
        build.compile(name);
    }
}

/// Returns the numbers of these headers as constants of Rust: each `#define WAKEONE_NAME 1` and `WAKEONE_NAME = 1,` of an
/// enum. BTF has no defines, and the skeleton no enums.
fn constants(headers: &[PathBuf]) -> String {
    let mut rust = String::new();
    for header in headers {
        let text = fs::read_to_string(header)
            .unwrap_or_else(|error| panic!("{}: {error}", header.display()));
        for line in text.lines() {
            let defined = line
                .strip_prefix("#define WAKEONE_")
                .and_then(|rest| rest.split_once(' '));
            let counted = line.trim().strip_prefix("WAKEONE_");
            let Some((name, rest)) = defined.or(counted.and_then(|rest| rest.split_once(" = ")))
            else {
                continue;
            };
            let value = rest.split([',', ' ']).next().unwrap_or_default();
            let value = match value.strip_prefix("0x") {
                Some(digits) => u32::from_str_radix(digits, 16),
                None => value.parse(),
            };
            if let Ok(value) = value {
                rust += &format!("/// `WAKEONE_{name}`.\npub const {name}: u32 = {value};\n");
            }
        }
    }
    rust
}

/// Tells the pinned programs of one build from those of another.
fn identity(out: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    for object in ["dispatch", "datagram", "quic", "lookup", "join"] {
        let path = out.join(format!("{object}.bpf.o"));
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        hasher.write(&bytes);
    }
    hasher.finish()
}

fn compile(bpf: &Path, object: &str, arch: &str, out: &Path) {
    // Debian keeps asm/types.h in the multiarch folder, and that of a machine of another kind beside its compiler.
    let own = format!("/usr/include/{arch}-linux-gnu");
    let headers = match Path::new(&own).exists() {
        true => own,
        false => format!("/usr/{arch}-linux-gnu/include"),
    };
    // The name of this architecture in the helpers' headers.
    let target = match arch {
        "x86_64" => "x86",
        "aarch64" => "arm64",
        other => other,
    };
    SkeletonBuilder::new()
        .source(bpf.join(format!("{object}.bpf.c")))
        // Kept for tests/verifier.rs, which loads its programs one by one.
        .obj(out.join(format!("{object}.bpf.o")))
        .clang_args([
            // clang 14 makes atomics that return a value only from v3 on.
            "-mcpu=v3".into(),
            "-Wall".into(),
            "-Werror".into(),
            format!("-D__TARGET_ARCH_{target}"),
            format!("-I{headers}"),
        ])
        .build_and_generate(out.join(format!("{object}.skel.rs")))
        .unwrap_or_else(|error| {
            panic!(
                "bpf/{object}.bpf.c must compile: clang (with its BPF target) and the kernel's UAPI headers are needed; \
                 `make deps` installs them: {error:#}"
            )
        });
}
