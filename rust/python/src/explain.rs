//! The algorithm and the plans that a group would take for a call, for `unisono explain`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use unisono::plan::cost::Costs;
use unisono::plan::explain::Question;
use unisono::plan::topology::Topology;
use unisono::plan::{self, Algorithm, Buffer, Collective, Plan, Span, Step};
use unisono::types::{DataType, ReduceOp};

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Not by `add`, which would make it a part of the package's public face.
    module.setattr("_explain", wrap_pyfunction!(explain, module)?)
}

/// Ranks up to which the plans of all are made and simulated.
const MOST_RANKS: usize = 64;

/// Steps of all ranks up to which they are simulated, and up to which they are told.
const MOST_SIMULATED: usize = 200_000;
const MOST_TOLD: usize = 20_000;

/// The named one of `all`, or a `ValueError` that names them.
pub(crate) fn named<T: Copy>(
    what: &str,
    name: &str,
    all: &[T],
    of: impl Fn(T) -> &'static str,
) -> PyResult<T> {
    all.iter()
        .copied()
        .find(|it| of(*it) == name)
        .ok_or_else(|| {
            let names: Vec<_> = all.iter().map(|it| of(*it)).collect();
            PyValueError::new_err(format!("{what} {name:?} is none of {}", names.join(", ")))
        })
}

/// A group without processes: its algorithm for a call, the prices of all that serve it, and its plans.
///
/// Parameters
/// ----------
/// collective : str
///     The operation.
/// size : int
///     Bytes of the longer buffer of a rank.
/// hosts : list of int
///     The host of each rank, numbered from 0 on without gaps.
/// dtype : str
///     The type of the elements.
/// root : int
///     The root, where there is one.
/// cores : int, optional
///     Cores that the ranks of a host share; those that this process may use, if not given.
/// heap : bool
///     Whether the buffers lie in the shared heap.
/// algorithm : str, optional
///     The algorithm that the user asks for.
/// typical : bool
///     Prices of a typical machine, not of this one.
/// latency : float, optional
///     Seconds from host to host.
/// rate : float, optional
///     Bytes a second between hosts.
///
/// Returns
/// -------
/// dict
///     ``algorithm``, ``prices`` (name and seconds, cheapest first), ``costs``, ``count`` (elements) and ``element_size``;
///     up to 64 ranks ``plans`` (for each rank its number of steps, messages and bytes, and up to 20,000 steps in all the
///     steps with their rounds), ``rounds`` and ``simulated`` (seconds).
///
/// Raises
/// ------
/// ValueError
///     For names that there are not, ranks that are none, and messages between two ranks.
#[pyfunction]
#[pyo3(
    name = "_explain",
    signature = (collective, size, hosts, *, dtype="float32", root=0, cores=None, heap=false, algorithm=None, typical=false, latency=None, rate=None)
)]
#[expect(clippy::too_many_arguments, reason = "each is a keyword of Python's")]
fn explain<'py>(
    py: Python<'py>,
    collective: &str,
    size: usize,
    hosts: Vec<usize>,
    dtype: &str,
    root: usize,
    cores: Option<usize>,
    heap: bool,
    algorithm: Option<&str>,
    typical: bool,
    latency: Option<f64>,
    rate: Option<f64>,
) -> PyResult<Bound<'py, PyDict>> {
    let collective = named(
        "the operation",
        collective,
        &Collective::ALL,
        Collective::name,
    )?;
    let dtype = named("the type", dtype, &DataType::ALL, DataType::name)?;
    let wanted = algorithm
        .map(|name| named("the algorithm", name, &Algorithm::ALL, Algorithm::name))
        .transpose()?;
    let here = unisono::costs_here();
    let mut costs = if typical {
        Costs::TYPICAL
    } else {
        here.costs()
    };
    costs.remote_latency = latency.unwrap_or(costs.remote_latency);
    costs.remote_byte = rate.map_or(costs.remote_byte, |rate| 1.0 / rate);
    let world = hosts.len();
    let topology = Topology::from_hosts(&hosts, cores.unwrap_or_else(|| here.cores()))
        .with_links(costs.remote_latency, costs.remote_byte);
    let question = Question {
        collective,
        count: size / dtype.size() / collective.blocks(world).max(1),
        root,
        element_size: dtype.size(),
        widen: collective.reduces() && ReduceOp::Sum.accumulator(dtype) != dtype,
        in_heap: heap,
        topology,
        costs,
        wanted,
    };
    let answer = question.answer().ok_or_else(|| {
        let message = format!("no group of {world} ranks does {collective} with root {root}");
        PyValueError::new_err(message)
    })?;
    let told = PyDict::new(py);
    let prices: Vec<_> = answer
        .prices
        .iter()
        .map(|(it, price)| (it.name(), *price))
        .collect();
    told.set_item("algorithm", answer.algorithm.name())?;
    told.set_item("prices", prices)?;
    told.set_item("costs", told_costs(py, &costs)?)?;
    told.set_item("cores", question.topology.cores_per_host)?;
    told.set_item("count", question.count)?;
    told.set_item("element_size", dtype.size())?;
    if world <= MOST_RANKS {
        let plans = (0..world).map(|rank| question.plan(answer.algorithm, rank));
        if let Some(plans) = plans.collect::<Option<Vec<_>>>() {
            tell_plans(&told, &question, &plans)?;
        }
    }
    Ok(told)
}

/// Prices in seconds, of an operation or for a byte.
fn told_costs<'py>(py: Python<'py>, costs: &Costs) -> PyResult<Bound<'py, PyDict>> {
    let told = PyDict::new(py);
    for (name, value) in [
        ("message", costs.message),
        ("latency", costs.latency),
        ("turn", costs.turn),
        ("copy", costs.copy),
        ("fold", costs.fold),
        ("loan", costs.loan),
        ("remote_message", costs.remote_message),
        ("remote_latency", costs.remote_latency),
        ("remote_byte", costs.remote_byte),
    ] {
        told.set_item(name, value)?;
    }
    Ok(told)
}

/// Adds the plans of all ranks.
fn tell_plans(told: &Bound<'_, PyDict>, question: &Question, plans: &[Plan]) -> PyResult<()> {
    let py = told.py();
    let steps: usize = plans.iter().map(|plan| plan.steps.len()).sum();
    let rounds = match steps <= MOST_TOLD {
        true => plan::rounds(plans),
        false => None,
    };
    let last = rounds.iter().flatten().flatten().max();
    told.set_item("rounds", last)?;
    if steps <= MOST_SIMULATED {
        told.set_item("simulated", question.simulated(plans))?;
    }
    let hosts = &question.topology.host_of;
    let list = PyList::empty(py);
    for (rank, plan) in plans.iter().enumerate() {
        let one = PyDict::new(py);
        let (mut messages, mut sent, mut far) = (0, 0, 0);
        for step in &plan.steps {
            if let Step::Send { to, src } = step {
                let bytes = question.bytes(*src);
                messages += 1;
                sent += bytes;
                far += if hosts[*to] == hosts[rank] { 0 } else { bytes };
            }
        }
        one.set_item("steps", plan.steps.len())?;
        one.set_item("messages", messages)?;
        one.set_item("sent", sent)?;
        one.set_item("sent_to_other_hosts", far)?;
        if let Some(rounds) = &rounds {
            let steps = plan.steps.iter().zip(&rounds[rank]);
            let steps = steps.map(|(step, round)| told_step(py, step, *round));
            one.set_item("plan", steps.collect::<PyResult<Vec<_>>>()?)?;
        }
        list.append(one)?;
    }
    told.set_item("plans", list)
}

/// A step: its kind, round and peers, and the elements that it works on.
fn told_step<'py>(py: Python<'py>, step: &Step, round: usize) -> PyResult<Bound<'py, PyDict>> {
    let told = PyDict::new(py);
    let (kind, peers, from, to) = match *step {
        Step::Send { to, src } => ("send", vec![to], Some(src), None),
        Step::Recv { from, dst, .. } => ("recv", vec![from], None, Some(dst)),
        Step::Fold { from, dst, .. } => ("fold", vec![from], None, Some(dst)),
        Step::Copy { src, dst } => ("copy", vec![], Some(src), Some(dst)),
        Step::Reduce { src, dst } => ("reduce", vec![], Some(src), Some(dst)),
        Step::Finish { src, dst } => ("finish", vec![], Some(src), Some(dst)),
        Step::ReduceAll { dst, copies, .. } => {
            ("reduce_all", copies.iter().collect(), None, Some(dst))
        }
        Step::Signal { to, .. } => ("signal", to.iter().collect(), None, None),
        Step::Wait { from, .. } => ("wait", from.iter().collect(), None, None),
    };
    told.set_item("kind", kind)?;
    told.set_item("round", round)?;
    told.set_item("peers", peers)?;
    for (name, span) in [("from", from), ("to", to)] {
        told.set_item(name, span.map(|span| (place(span), span.offset, span.len)))?;
    }
    Ok(told)
}

/// The memory of a span, in words.
fn place(span: Span) -> String {
    match span.buffer {
        Buffer::Input => "input".to_owned(),
        Buffer::Output => "output".to_owned(),
        Buffer::Scratch => "scratch".to_owned(),
        Buffer::Window { rank, half } => format!("window {rank}.{half}"),
    }
}
