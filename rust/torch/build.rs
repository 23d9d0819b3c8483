//! Compiles the bridge and `csrc/` against torch's headers and links them to the two of its libraries that define what they
//! derive from. The folder comes from `UNISONO_TORCH_DIR` rather than from importing torch: a build should not need an
//! interpreter in which torch works.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// The oldest torch 2 minor version whose interface csrc/ is written for.
const OLDEST_MINOR: u32 = 11;
const VARIABLE: &str = "UNISONO_TORCH_DIR";
/// The file name of the door, which tells torches apart that follow each other in one folder.
const DOOR: &str = "UNISONO_DOOR";
/// Set by `cargo clippy`.
const CLIPPY: &str = "CLIPPY_ARGS";

fn main() {
    if let Err(reason) = compile() {
        eprintln!("unisono: {reason}");
        std::process::exit(1);
    }
}

fn compile() -> Result<(), String> {
    println!("cargo:rerun-if-env-changed={VARIABLE}");
    println!("cargo:rerun-if-env-changed={DOOR}");
    let torch = PathBuf::from(env::var_os(VARIABLE).ok_or_else(|| {
        format!(
            "{VARIABLE} is not set, and unisono-torch needs it: the folder of an installed torch, as \
             printed by python -c 'import torch; print(torch.__path__[0])' (`make setup` does all this)"
        )
    })?);
    check_version(&torch)?;

    let csrc = Path::new("../../csrc");
    println!("cargo:rerun-if-changed={}", csrc.display());
    cxx_build::CFG.include_prefix = "unisono";
    let mut bridge = cxx_build::bridge("src/bridge.rs");
    // Clippy looks at Rust alone, and torch's headers take a compiler long.
    println!("cargo:rerun-if-env-changed={CLIPPY}");
    if env::var_os(CLIPPY).is_some() {
        return Ok(());
    }
    bridge
        .std("c++20")
        .pic(true)
        .include(csrc)
        .flag("-isystem")
        .flag(torch.join("include"))
        .flag("-isystem")
        .flag(torch.join("include/torch/csrc/api/include"))
        .flag_if_supported("-Wno-deprecated-declarations");
    // Lines are all that a profile or a backtrace needs, and cargo does not say that they are all it asks for. Descriptions of
    // what torch's headers declare would take as long to write as everything else.
    if env::var("DEBUG").is_ok_and(|debug| debug != "false") {
        bridge.flag("-g1");
    }
    bridge
        .file(csrc.join("unisono.cpp"))
        .file(csrc.join("old_runtime.cpp"))
        .compile("unisono_torch");

    // No rpath: torch has been imported before the module is loaded, and its libraries are then found by their
    // names.
    println!(
        "cargo:rustc-link-search=native={}",
        torch.join("lib").display()
    );
    println!("cargo:rustc-link-lib=dylib=torch_cpu");
    println!("cargo:rustc-link-lib=dylib=c10");
    println!("cargo:rustc-link-arg-cdylib=-Wl,--exclude-libs,ALL");
    Ok(())
}

fn check_version(torch: &Path) -> Result<(), String> {
    let path = torch.join("include/torch/headeronly/version.h");
    let header = fs::read_to_string(&path).map_err(|cause| {
        format!(
            "{VARIABLE} does not point to a torch with headers: {}: {cause}",
            path.display()
        )
    })?;
    let number = |name: &str| -> Option<u32> {
        let line = header
            .lines()
            .find(|l| l.starts_with(&format!("#define {name} ")))?;
        line.rsplit(' ').next()?.parse().ok()
    };
    match (number("TORCH_VERSION_MAJOR"), number("TORCH_VERSION_MINOR")) {
        (Some(2), Some(minor)) if minor >= OLDEST_MINOR => Ok(()),
        (Some(major), Some(minor)) => Err(format!(
            "torch {major}.{minor} in {} is not supported: unisono needs torch 2.{OLDEST_MINOR} or newer",
            torch.display()
        )),
        _ => Err(format!("{} does not tell torch's version", path.display())),
    }
}
