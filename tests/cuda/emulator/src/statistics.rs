//! The report: counted at the end of the process, and whenever one asks.

use std::ffi::c_char;
use std::fmt::Write as _;

use crate::abi::Out;
use crate::memory::{self, Kind};
use crate::settings::settings;
use crate::{call, context, event, graph, memory_operations, module, stream};

/// The report as JSON: what is alive, what was done.
pub(crate) fn report() -> String {
    let (graphs, executables) = graph::counts();
    let (written, awaited) = memory_operations::counts();
    let devices = 0..context::visible_devices().len();
    let bytes: usize = devices.map(memory::in_use).sum();
    let errors = context::all().iter().map(|context| context.error()).max();
    let numbers = [
        ("pid", std::process::id() as usize),
        ("allocations", memory::count(Kind::Device)),
        ("allocated_bytes", bytes),
        ("peak_bytes", memory::peak()),
        ("pinned", memory::count(Kind::Pinned)),
        ("registrations", memory::count(Kind::Registered)),
        ("imports", memory::count(Kind::Imported)),
        ("freed_while_imported", memory::freed_while_imported()),
        ("contexts", context::kept()),
        ("streams", stream::count()),
        ("unfinished_operations", stream::unfinished() as usize),
        ("calls_made", call::counts().values().sum::<u64>() as usize),
        ("words_written", written),
        ("words_awaited", awaited),
        ("events", event::count()),
        ("modules", module::count()),
        ("graphs", graphs),
        ("graph_executables", executables),
        ("error", errors.unwrap_or(0) as usize),
    ];
    let mut text = String::from("{");
    for (name, number) in numbers {
        let _ = write!(text, "\"{name}\": {number}, ");
    }
    let calls: Vec<String> = call::counts()
        .iter()
        .map(|(name, count)| format!("\"{name}\": {count}"))
        .collect();
    let _ = write!(text, "\"calls\": {{{}}}}}", calls.join(", "));
    text
}

/// Writes the report to the file that was asked for.
pub(crate) fn write_report() {
    if let Some(path) = &settings().report {
        let path = path.replace("%p", &std::process::id().to_string());
        if let Err(error) = std::fs::write(&path, report() + "\n") {
            eprintln!("cuda emulator: the report could not be written to {path}: {error}");
        }
    }
}

/// Keeps the report in `text`, as far as it fits into `bytes`, with a zero byte at the end. No function of the driver's.
///
/// # Returns
/// The bytes it takes, the zero byte included.
///
/// # Safety
/// `text` is null or has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEmulatorStatistics(text: Out<c_char>, bytes: usize) -> usize {
    let report = report();
    if !text.is_null() && bytes > 0 {
        let length = report.len().min(bytes - 1);
        // SAFETY: the caller has room for `bytes` bytes, and `length` and the zero byte are not more.
        unsafe {
            std::ptr::copy_nonoverlapping(report.as_ptr(), text.pointer().cast(), length);
            *text.pointer().add(length) = 0;
        }
    }
    report.len() + 1
}
