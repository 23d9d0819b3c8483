//! The committed modules: made from these very sources, with the entry points that the core
//! launches, and nothing in them that would give other bits or need another GPU.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use sha2::{Digest, Sha256};
use unisono::types::DataType;

use super::{Kernel, folder, kernels, ptx};

/// As build.py has it: of each source its name, a zero byte and its bytes.
fn digest() -> String {
    let is_source = |path: &PathBuf| path.extension().is_some_and(|e| e == "cu" || e == "cuh");
    let entries = fs::read_dir(folder()).unwrap();
    let mut sources: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(is_source)
        .collect();
    sources.sort();
    let mut state = Sha256::new();
    for source in sources {
        state.update(source.file_name().unwrap().as_encoded_bytes());
        state.update([0]);
        state.update(fs::read(source).unwrap());
    }
    format!("{:x}", state.finalize())
}

/// An entry point: its name, the bytes of its parameters, its instructions.
struct Entry<'a> {
    name: &'a str,
    sizes: Vec<usize>,
    body: &'a str,
}

fn entries(ptx: &str) -> Vec<Entry<'_>> {
    let texts = ptx.split(".visible .entry ").skip(1);
    let entry = |text| {
        let (name, rest) = str::split_once(text, '(').unwrap();
        let (parameters, body) = rest.split_once(')').unwrap();
        let parameters = parameters.split(',').filter(|text| text.contains(".param"));
        let sizes = parameters.map(parameter_bytes).collect();
        Entry { name, sizes, body }
    };
    texts.map(entry).collect()
}

/// Of `.param .u64 name` or `.param .align 8 .b8 name[512]`.
fn parameter_bytes(text: &str) -> usize {
    match text.split_once('[') {
        Some((_, length)) => length.trim_end().trim_end_matches(']').parse().unwrap(),
        None => {
            let kind = text.split_whitespace().nth(1).unwrap();
            let bits: usize = kind[2..].parse().unwrap();
            bits / 8
        }
    }
}

#[test]
fn every_module_is_made_from_these_sources() {
    let digest = digest();
    for dtype in DataType::ALL {
        let ptx = ptx(dtype.name());
        let first = ptx.lines().next().unwrap();
        assert!(
            first.starts_with(&format!("// {dtype} sha256 {digest} nvrtc 12.")),
            "{dtype}.ptx.gz was made from other sources than those of {digest}; run `make ptx`. It says: {first}"
        );
    }
}

#[test]
fn every_module_has_the_entry_points_of_the_host_build_with_the_same_parameters() {
    for dtype in DataType::ALL {
        let ptx = ptx(dtype.name());
        let found: BTreeSet<_> = entries(&ptx)
            .into_iter()
            .map(|entry| (entry.name.to_owned(), entry.sizes))
            .collect();
        let of_module = |kernel: &&Kernel| kernel.dtype() == dtype.name();
        let expected: BTreeSet<_> = kernels()
            .iter()
            .filter(of_module)
            .map(|kernel| (kernel.name().to_owned(), kernel.parameter_bytes().to_vec()))
            .collect();
        assert_eq!(found, expected, "{dtype}");
    }
}

#[test]
fn every_module_is_for_any_driver_of_cuda_12_and_any_gpu_since_pascal() {
    for dtype in DataType::ALL {
        let ptx = ptx(dtype.name());
        assert!(ptx.contains("\n.version 8.0\n"), "{dtype}");
        assert!(ptx.contains("\n.target sm_60\n"), "{dtype}");
    }
}

#[test]
fn every_reduction_moves_vectors_and_keeps_to_its_registers() {
    for dtype in DataType::ALL {
        let ptx = ptx(dtype.name());
        // One barrier by which a block learns of a failure is all that its threads have to do with each other.
        let ptx = ptx
            .replace("bar.red.or.pred", "")
            .replace("barrier.red.or.pred", "");
        for forbidden in [
            ".local", ".shared", "bar.", "barrier.", "atom.", "red.", "call",
        ] {
            assert!(
                !ptx.contains(forbidden),
                "{dtype}: {forbidden} is in the module"
            );
        }
        for entry in entries(&ptx) {
            let what = format!("{} of {dtype}", entry.name);
            let loads = entry.body.matches("ld.global.v4.u32").count();
            let contributions = if entry.name == "unisono_scale" { 1 } else { 2 };
            // Three move nothing: they look after a failure, or find places.
            let moves = !["unisono_poison", "unisono_look", "unisono_place"].contains(&entry.name);
            assert!(
                !moves || loads >= contributions,
                "{what}: {loads} vector loads"
            );
            assert!(!moves || entry.body.contains("st.global.v4.u32"), "{what}");
            let generic = |line: &&str| line.contains("\tld.u") || line.contains("\tst.u");
            let generic: Vec<_> = entry.body.lines().filter(generic).collect();
            assert!(generic.is_empty(), "{what}: {generic:?}");
        }
    }
}

/// Without `.rn` the driver may fuse a product and a sum.
#[test]
fn every_float_operation_is_rounded_by_itself() {
    for dtype in DataType::ALL {
        let ptx = ptx(dtype.name());
        let float = |line: &&str| line.contains(".f32 ") || line.contains(".f64 ");
        for line in ptx.lines().filter(float) {
            let operation = line.split_whitespace().find(|word| !word.starts_with('@'));
            let operation = operation.unwrap_or_default();
            let calculates = ["add", "sub", "mul", "div", "fma", "mad", "rcp", "sqrt"]
                .iter()
                .any(|name| operation.starts_with(name));
            let is_exact = operation.ends_with(".rn.f32") || operation.ends_with(".rn.f64");
            assert!(
                !calculates || (is_exact && !operation.starts_with("fma")),
                "{dtype}: {line}"
            );
            assert!(
                !operation.contains("ftz") && !operation.contains("approx"),
                "{dtype}: {line}"
            );
        }
    }
}
