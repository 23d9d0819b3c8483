//! The exported functions, with the driver's names and signatures.

pub mod devices;
pub mod execution;
pub mod memory;
pub mod order;

/// The address of a function, by its name with or without its version.
pub(crate) fn find(name: &str) -> Option<usize> {
    let mut all = devices::table();
    all.extend(memory::table());
    all.extend(order::table());
    all.extend(execution::table());
    let exactly = |wanted: &str| {
        let found = all.iter().find(|(name, _)| *name == wanted);
        found.map(|&(_, address)| address)
    };
    exactly(&format!("{name}_v2")).or_else(|| exactly(name))
}
