//! Jobs that are simulated, for `unisono simulate`.

use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use unisono::simulate::{Asks, Event, Job};
use unisono::types::Collective;

use crate::errors::exception;
use crate::explain::named;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Not by `add`, which would make them a part of the package's public face.
    module.setattr("_simulate", wrap_pyfunction!(simulate, module)?)?;
    module.setattr("_world", wrap_pyfunction!(world, module)?)
}

/// An event as Python writes it: its kind, the rank, seconds from the start or the number of a call, and seconds that it
/// lasts.
type Told = (String, usize, f64, f64);

/// Simulates a job: all ranks in this thread, over links and on a clock of their own.
///
/// Parameters
/// ----------
/// hosts : list of int
///     The host of each rank, numbered from 0 on without gaps.
/// calls : list of (str, int, int)
///     The operation, the bytes of the longer buffer of a rank, and the root.
/// latency : float
///     Seconds from host to host.
/// rate : float
///     Bytes a second that leave a host.
/// event : (str, int, float, float), optional
///     "dies", "dark", "breaks", "stops" or "skips", the rank, when (seconds, or the number of the call), and for how long.
/// settings : list of (str, str)
///     Names and values of settings.
/// seed : int
///     Decides which rank moves first where several can.
/// story : bool
///     Whether the events are told.
///
/// Returns
/// -------
/// dict
///     ``ranks``, for each a list of its calls (``call``, ``begun`` and ``ended`` in seconds, ``algorithm``, ``error``), and
///     ``story``, the events.
///
/// Raises
/// ------
/// ValueError
///     For a job that cannot be.
#[pyfunction]
#[pyo3(name = "_simulate", signature = (hosts, calls, *, latency, rate, event, settings, seed, story))]
#[expect(clippy::too_many_arguments, reason = "each is a keyword of Python's")]
fn simulate<'py>(
    py: Python<'py>,
    hosts: Vec<usize>,
    calls: Vec<(String, usize, usize)>,
    latency: f64,
    rate: f64,
    event: Option<Told>,
    settings: Vec<(String, String)>,
    seed: u64,
    story: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let calls = calls.iter().map(|(name, bytes, root)| {
        let collective = named("the operation", name, &Collective::ALL, Collective::name)?;
        Ok(Asks {
            collective,
            bytes: *bytes,
            root: *root,
        })
    });
    let job = Job {
        hosts,
        latency: seconds(latency)?,
        rate,
        calls: calls.collect::<PyResult<_>>()?,
        event: event.map(event_of).transpose()?,
        settings,
        seed,
        story,
    };
    let mut raised = None;
    let goes_on = || match Python::attach(|py| py.check_signals()) {
        Ok(()) => true,
        Err(error) => {
            raised = Some(error);
            false
        }
    };
    let report = py.detach(|| unisono::simulate::simulate(&job, goes_on));
    if let Some(raised) = raised {
        return Err(raised);
    }
    let report = report.map_err(|error| exception(py, &error))?;
    let ranks = PyList::empty(py);
    for calls in &report.ranks {
        let list = PyList::empty(py);
        for ended in calls {
            let told = PyDict::new(py);
            told.set_item("call", ended.call)?;
            told.set_item("algorithm", ended.algorithm)?;
            told.set_item("begun", ended.begun.as_secs_f64())?;
            told.set_item("ended", ended.ended.map(|at| at.as_secs_f64()))?;
            told.set_item("error", ended.error.as_ref().map(ToString::to_string))?;
            list.append(told)?;
        }
        ranks.append(list)?;
    }
    let told = PyDict::new(py);
    told.set_item("ranks", ranks)?;
    told.set_item("story", report.story)?;
    Ok(told)
}

/// The world of a seed of unisono's own tests: its events.
#[pyfunction]
#[pyo3(name = "_world")]
fn world(py: Python<'_>, seed: u64) -> PyResult<String> {
    py.detach(|| unisono::simulate::world_of(seed))
        .map_err(|error| exception(py, &error))
}

fn seconds(value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| PyValueError::new_err(format!("{value} seconds are no time")))
}

fn event_of((kind, rank, at, lasts): Told) -> PyResult<Event> {
    let (moment, lasts) = (seconds(at)?, seconds(lasts)?);
    Ok(match &*kind {
        "dies" => Event::Dies(rank, moment),
        "dark" => Event::GoesDark(rank, moment),
        "breaks" => Event::LosesConnections(rank, moment, lasts),
        "stops" => Event::Stops(rank, moment, lasts),
        "skips" => Event::Skips(rank, at as usize),
        other => {
            let known = "dies, dark, breaks, stops, skips";
            let message = format!("the event {other:?} is none of {known}");
            return Err(PyValueError::new_err(message));
        }
    })
}
