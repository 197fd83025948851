//! Compiles the library of `src/c` and leaves it where `include_bytes!` finds it.

use std::{env, path::PathBuf};

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    println!("cargo:rerun-if-changed=src/c");

    // C and not Rust: it runs inside processes that know nothing of it, between fork and exec, with their signals and
    // their stack. It must not allocate, panic or start anything.
    let mut compiler = cc::Build::new()
        .opt_level(2)
        .pic(true)
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .flag("-fvisibility=hidden")
        .flag("-std=gnu11")
        .get_compiler()
        .to_command();
    let library = out.join("libwakeone-split.so");
    compiler
        .args(["-shared", "-Wl,-soname,libwakeone-split.so"])
        .args(["-Wl,-z,now", "-Wl,-z,relro", "-Wl,-z,noexecstack", "-s"])
        .arg("-o")
        .arg(&library);
    for file in ["start.c", "state.c", "broker.c", "calls.c", "readers.c"] {
        compiler.arg(root.join("src/c").join(file));
    }
    let status = compiler.arg("-ldl").status();
    assert!(
        status.as_ref().is_ok_and(|status| status.success()),
        "the library of crates/shim must compile: a C compiler is needed; `make deps` installs one: {status:?}"
    );
}
