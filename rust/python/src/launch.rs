//! The launcher, for `python -m unisono launch`.

use std::ffi::OsString;

use pyo3::prelude::*;
use unisono_launch::Door;

/// Launch ranks as `unisono launch` does with `arguments`, and return the status to exit with.
///
/// It takes over the signals of the process, which should do nothing else, and calls itself in other processes:
/// `again` is the command that calls this function with the arguments that follow it. Python scripts are
/// run by `interpreter`, and where that is not what the user may expect, `note` says so.
#[pyfunction]
#[pyo3(signature = (arguments, *, again, interpreter, note=None))]
fn launch(
    py: Python<'_>,
    arguments: Vec<OsString>,
    again: Vec<OsString>,
    interpreter: OsString,
    note: Option<String>,
) -> u8 {
    let door = Door {
        again,
        interpreter,
        note,
    };
    py.detach(|| unisono_launch::launch(&arguments, &door))
}

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Not by `add`, which would make it a part of the package's public face.
    module.setattr("launch", wrap_pyfunction!(launch, module)?)
}
