//! Joining and leaving a group. The operations of the class are in `collectives.rs` and `point_to_point.rs`.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use unisono::Communicator as Core;
use unisono::config::Config;
use unisono::error::Error;
use unisono::rendezvous::MeetingPlace;
use unisono::rendezvous::launcher::{self, Launch};

use crate::errors::{exception, invalid};
use crate::joined::Shared;
use crate::running::{Call, Seconds, elsewhere, finish, run, start};
use crate::settings::Options;
use crate::work::Work;

/// The source of a receive that takes a message from any rank.
pub(crate) const ANY_SOURCE: i64 = -1;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Communicator>()?;
    module.add_function(wrap_pyfunction!(init, module)?)?;
    module.add("ANY_SOURCE", ANY_SOURCE)?;
    Ok(())
}

/// Join the group of ranks that this process belongs to. Blocks until all have come.
///
/// Without arguments, what the launcher left in the environment says where and as which rank:
/// torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or those of Slurm, Open MPI
/// or MPICH.
///
/// Parameters
/// ----------
/// url : str, optional
///     Where the ranks meet: ``tcp://host:port``, an address of rank 0, which serves there; or
///     ``file:///path``, a file that all ranks can reach, new for every job.
/// rank : int, optional
///     This process's rank. Without it, the launcher's.
/// world_size : int, optional
///     How many ranks there are. Without it, the launcher's.
/// timeout : float or datetime.timedelta, optional
///     How many seconds joining may take, and later every operation. Without it, as `options` say:
///     by default 300 for joining and 1800 for an operation.
/// options : Options, optional
///     Settings; `timeout` comes before those in it.
///
/// Returns
/// -------
/// Communicator
///     The group of all ranks.
///
/// Raises
/// ------
/// InvalidArgumentError
///     The arguments or the environment do not say how to join, or another process has this rank.
/// TimeoutError
///     Not all ranks came; names those that did not.
/// MismatchError
///     The ranks disagree on the world size or on settings.
///
/// Examples
/// --------
/// >>> comm = unisono.init()
/// >>> comm = unisono.init("tcp://10.0.0.1:29500", rank=1, world_size=4)
#[pyfunction]
#[pyo3(signature = (url=None, *, rank=None, world_size=None, timeout=None, options=None))]
fn init(
    py: Python<'_>,
    url: Option<String>,
    rank: Option<i64>,
    world_size: Option<i64>,
    timeout: Option<Seconds>,
    options: Option<&Options>,
) -> PyResult<Communicator> {
    let fail = |error: Error| exception(py, &error);
    let config = configure(options, timeout).map_err(fail)?;
    let url = url.filter(|url| url != "env://");
    let launch = identify(url.is_some(), rank, world_size).map_err(fail)?;
    let join = move || {
        let (rank, world) = (launch.rank, launch.world);
        let place = match url {
            Some(url) => MeetingPlace::Url(url),
            None => MeetingPlace::Launch(launch),
        };
        let comm = unisono::Communicator::meet(place, (rank, world), config)?;
        Ok(Shared::register(comm))
    };
    Ok(Communicator {
        shared: elsewhere(py, join, || {})?,
    })
}

fn configure(
    options: Option<&Options>,
    timeout: Option<Seconds>,
) -> unisono::error::Result<Config> {
    let options = options.cloned().unwrap_or_default();
    let mut config = options.apply()?;
    if let Some(Seconds(limit)) = timeout {
        let seconds = limit.as_secs_f64().to_string();
        config.set("timeout", &seconds)?;
        if !options.has("join_timeout") {
            config.set("join_timeout", &seconds)?;
        }
    }
    Ok(config)
}

/// This process's rank and the world size: as the arguments say, else the launcher.
fn identify(
    has_url: bool,
    rank: Option<i64>,
    world: Option<i64>,
) -> unisono::error::Result<Launch> {
    if let (Some(rank), Some(world)) = (rank, world)
        && !(0..world).contains(&rank)
    {
        return Err(Error::invalid(format!(
            "rank {rank} is out of range for a world size of {world}"
        )));
    }
    let given = |name: &str| match name {
        "RANK" => rank.map(|rank| rank.to_string()),
        "WORLD_SIZE" => world.map(|world| world.to_string()),
        _ => None,
    };
    if rank.is_none() && world.is_none() {
        return launcher::detect();
    }
    if let (Some(rank), Some(world)) = (rank, world)
        && (has_url || world == 1)
    {
        return Ok(Launch {
            rank: rank as usize,
            world: world as usize,
            local_rank: None,
            local_world: None,
            master: None,
            job: String::new(),
            secret: None,
            source: "the arguments of init",
        });
    }
    let lookup = |name: &str| given(name).or_else(|| std::env::var(name).ok());
    launcher::detect_from(&lookup, std::os::unix::process::parent_id())
}

/// A group of ranks that communicate; `init` makes one, `split` divides one, `shrink` and `mask` go on
/// without ranks that are gone, `grow` takes in others.
///
/// All ranks of a group call the same collectives in the same order. Sends and receives are matched
/// by rank and tag instead. Several threads may use a communicator at once, as long as the order of
/// collectives is the same on all ranks.
///
/// **Arrays** are NumPy arrays, anything with DLPack (torch tensors, CuPy and JAX arrays) or
/// ``__cuda_array_interface__``, or bytes-like. They are used where they lie, without a copy, and
/// must be contiguous in row-major order; only an input that is not is copied first, where its
/// library can. While an operation is under way, the program must not write to its arrays, nor read those that
/// it writes.
///
/// **Operations** block until done; with ``async_op=True`` they return a `Work` at once. Ctrl-C ends
/// every wait: a blocking operation that is interrupted aborts the communicator, since other ranks
/// may have this rank's part already.
///
/// **On CUDA devices** an operation happens in the order of a stream: `stream`, if given, else the
/// array's own, which is its library's current one. The call puts it there and returns. Its arrays,
/// all on one device, are kept until the stream has got past it, which is also when a `Work` is done;
/// a failure until then is raised by the `Work`, or by the next call. In a collective all ranks give
/// arrays on devices, or none does.
///
/// **Errors**: `InvalidArgumentError` and `UnsupportedError` are raised before anything is sent, and
/// the communicator still works. After any other error of an operation it is dead, on all ranks, and
/// every further call raises the first cause again.
///
/// As a context manager a communicator is closed at the end; if that is by an exception, it is
/// aborted, so that no rank waits for this one.
#[pyclass(frozen, module = "unisono", name = "Communicator", weakref)]
pub(crate) struct Communicator {
    pub(crate) shared: Arc<Shared>,
}

impl Communicator {
    pub(crate) fn core(&self) -> &unisono::Communicator {
        &self.shared.comm
    }

    /// Carries out `call`: returns its value, or with `asynchronously` a `Work`.
    pub(crate) fn carry_out(
        &self,
        py: Python<'_>,
        call: Call,
        asynchronously: bool,
    ) -> PyResult<Py<PyAny>> {
        if asynchronously {
            return self.launch(py, call).map(Py::into_any);
        }
        let value = call.value.clone_ref(py);
        run(py, self.core(), call)?;
        Ok(value)
    }

    pub(crate) fn launch(&self, py: Python<'_>, call: Call) -> PyResult<Py<Work>> {
        let (work, value) = start(py, self.core(), call)?;
        Py::new(py, Work::new(Arc::clone(&self.shared), work, value))
    }

    /// A communicator of the ranks that are left, which `make` makes.
    fn left(
        &self,
        py: Python<'_>,
        operation: &'static str,
        (exclude, timeout): (Option<Vec<i64>>, Option<Seconds>),
        make: fn(&Core, &[usize], Duration) -> unisono::error::Result<Core>,
    ) -> PyResult<Self> {
        let excluded = exclude
            .unwrap_or_default()
            .into_iter()
            .map(|rank| self.check_rank(py, operation, "exclude", rank))
            .collect::<PyResult<Vec<_>>>()?;
        let usual = self.core().config().join_timeout.duration();
        let patience = timeout.map_or(usual, |Seconds(limit)| limit);
        let shared = Arc::clone(&self.shared);
        let made = move || Ok(Shared::register(make(&shared.comm, &excluded, patience)?));
        let interrupt = || self.core().abort(&format!("interrupted in {operation}"));
        elsewhere(py, made, interrupt).map(|shared| Self { shared })
    }

    /// `value`, if it is the number of a rank.
    pub(crate) fn check_rank(
        &self,
        py: Python<'_>,
        operation: &str,
        name: &str,
        value: i64,
    ) -> PyResult<usize> {
        let world = self.core().world_size();
        match usize::try_from(value) {
            Ok(rank) if rank < world => Ok(rank),
            _ => Err(invalid(
                py,
                format!("{operation}: {name} {value} is out of range: the group has {world} ranks"),
            )),
        }
    }
}

#[pymethods]
impl Communicator {
    /// This process's number in the group, from 0.
    #[getter]
    fn rank(&self) -> usize {
        self.core().rank()
    }

    /// The number of ranks.
    #[getter]
    fn world_size(&self) -> usize {
        self.core().world_size()
    }

    /// The number of ranks: `world_size` by a shorter name.
    #[getter]
    fn size(&self) -> usize {
        self.core().world_size()
    }

    /// How many seconds an operation may take if it is not told otherwise; None for no limit.
    #[getter]
    fn timeout(&self) -> Option<f64> {
        let timeout = self.core().timeout();
        (!timeout.is_zero()).then_some(timeout.as_secs_f64())
    }

    #[setter]
    fn set_timeout(&self, value: Option<Seconds>) {
        // The core counts milliseconds, and zero is no limit.
        let limit = value.map(|Seconds(limit)| limit.max(Duration::from_millis(1)));
        self.core().set_timeout(limit.unwrap_or_default());
    }

    /// The first cause, once the communicator is dead; else None.
    #[getter]
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let error = self.core().error()?;
        Some(exception(py, &error).into_value(py).into_any())
    }

    /// Return what this rank has called, for which ranks it has waited and how long, and its links; any rank,
    /// at any time.
    ///
    /// An operation waits if it does not end within some tens of microseconds. A rank that is late
    /// has waited little itself, so compare the ranks: `unisono status` does.
    ///
    /// Returns
    /// -------
    /// dict
    ///     ``rank``; ``collectives`` and ``messages``, how many were called; ``called``, by name the
    ///     ``operations``, their ``bytes`` (of the longer buffer), how many were ``timed`` and the
    ///     ``moving_seconds`` in which these waited for no rank, and the same ``by_size``, with the
    ///     longest of each class, ``up_to``; ``links``, each
    ///     with ``rank``, ``for`` (collectives or messages), ``by`` (its way) and ``mended`` (times that
    ///     a connection of it was made again); ``network``, with the addresses at which it is
    ///     ``listening`` and the transports that were ``set_back``; and ``waited``, with
    ///     ``seconds`` and ``operations`` in all, ``by_operation`` by name and in it ``by_size``, each
    ///     with ``by_rank``, the ranks that cost most, and ``by_rank`` of all, the
    ///     most costly first: ``rank``, ``global`` (its number in the job), ``process``,
    ///     ``seconds``, ``operations``, ``last`` (operations in which it was waited for longest),
    ///     ``median_seconds`` and ``longest_seconds``.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let told = py.detach(|| self.core().stats());
        let text = told.map_err(|error| exception(py, &error))?;
        py.import("json")?.call_method1("loads", (text,))
    }

    /// The latest operations of this rank, one line per operation, oldest first: for reports.
    fn recent_operations(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.core().recent_operations())
    }

    /// Divide the group: ranks that give the same `color` form a new one. Every rank must call it.
    ///
    /// Parameters
    /// ----------
    /// color : int or None
    ///     Which of the new groups this rank belongs to; None for no group.
    /// key : int, optional
    ///     The ranks of a new group are in the order of their keys, and then of their old ranks.
    ///
    /// Returns
    /// -------
    /// Communicator or None
    ///     The new group that this rank belongs to. This one lives on beside it.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As a collective.
    #[pyo3(signature = (color, key=0))]
    fn split(&self, py: Python<'_>, color: Option<i64>, key: i64) -> PyResult<Option<Self>> {
        let shared = Arc::clone(&self.shared);
        let split = move || {
            let part = shared.comm.split(color, key)?;
            Ok(part.map(Shared::register))
        };
        let part = elsewhere(py, split, || self.core().abort("interrupted in split"))?;
        Ok(part.map(|shared| Self { shared }))
    }

    /// Make a communicator of the ranks that are left. All of them call it, after an error as a rule.
    ///
    /// It needs neither the store nor rank 0. The ranks agree on who they are, also when further ranks
    /// end meanwhile: on each that returns the result is the same. A rank whose process has ended is
    /// left out. This communicator stays as it is; close it when nothing needs it.
    ///
    /// Parameters
    /// ----------
    /// exclude : sequence of int, optional
    ///     Ranks that are left out although they live. They do not call it.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds to wait for ranks that live. Without it, as long as joining may take.
    ///
    /// Returns
    /// -------
    /// Communicator
    ///     The group of the ranks that are left, in their order. Its `former_ranks` are the numbers that
    ///     they had here; up to its `former_ended` the collectives have ended on all of them.
    ///
    /// Raises
    /// ------
    /// TimeoutError
    ///     A rank that lives has not called it; names such ranks. Called again, also with other ranks
    ///     left out, it goes on from there.
    /// PeerLostError
    ///     The ranks that can be reached are a minority, and those that cannot may live.
    /// AbortedError
    ///     The others go on without this rank, or one of them was interrupted or closed its communicator.
    ///
    /// Examples
    /// --------
    /// >>> try:
    /// ...     comm.all_reduce(gradients)
    /// ... except unisono.Error:
    /// ...     comm = comm.shrink()
    #[pyo3(signature = (exclude=None, timeout=None))]
    fn shrink(
        &self,
        py: Python<'_>,
        exclude: Option<Vec<i64>>,
        timeout: Option<Seconds>,
    ) -> PyResult<Self> {
        self.left(py, "shrink", (exclude, timeout), Core::shrink)
    }

    /// Make a communicator of the ranks that are left, as `shrink` does, in which they keep their numbers.
    ///
    /// Its `rank` and `size` are those of this one, and `living` has the ranks that are left. Each
    /// collective is one of those: sums and averages are of what they give. Where an array has a block
    /// for each rank, it has one for each that is gone, too, which is neither sent nor written; in a
    /// new array of the host such blocks are zero. A rank that is gone is no root, and no message goes to
    /// it.
    ///
    /// Parameters
    /// ----------
    /// exclude, timeout
    ///     As for `shrink`.
    ///
    /// Returns
    /// -------
    /// Communicator
    ///     The group of the ranks that are left.
    ///
    /// Raises
    /// ------
    /// Error
    ///     As `shrink`.
    ///
    /// Examples
    /// --------
    /// >>> comm = comm.mask()
    /// >>> average = comm.all_reduce(gradients, "avg")  # of those that are left
    #[pyo3(signature = (exclude=None, timeout=None))]
    fn mask(
        &self,
        py: Python<'_>,
        exclude: Option<Vec<i64>>,
        timeout: Option<Seconds>,
    ) -> PyResult<Self> {
        self.left(py, "mask", (exclude, timeout), Core::mask)
    }

    /// The ranks that take part: all of them; in a communicator that `mask` has made those that are left.
    #[getter]
    fn living(&self) -> Vec<usize> {
        self.core().living()
    }

    /// Make a communicator of these ranks and of processes that come, such as those that take the places of
    /// ranks that are gone. All ranks of this one call it; a process that comes calls `init`.
    ///
    /// Each rank has the number that it had when the job began, and those that come have the rest: they
    /// say theirs to `init`, as at the start. All ranks get the new communicator or none does. In vain it may
    /// be called again, or this communicator, which stays as it is, serves on. Close it when nothing needs
    /// it.
    ///
    /// Parameters
    /// ----------
    /// world_size : int, optional
    ///     How many ranks there will be. Without it, as many as met before.
    /// url : str, optional
    ///     Where they meet, as for `init`. Without it, where the ranks of this communicator met, unless
    ///     that was a file, which has to be new.
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds to wait for those that come. Without it, as long as joining may take.
    ///
    /// Returns
    /// -------
    /// Communicator
    ///     The group of all. Its `newcomers` are the ranks that came.
    ///
    /// Raises
    /// ------
    /// InvalidArgumentError
    ///     There is no place to meet, no rank is missing, or a rank's number is not below `world_size`.
    /// TimeoutError
    ///     Not all came, or a rank of this communicator has not called it; names such ranks.
    /// AbortedError
    ///     Another rank of this communicator did not meet those that came.
    /// PeerLostError
    ///     A rank of this communicator was lost meanwhile: `shrink` it, and call it again.
    ///
    /// Examples
    /// --------
    /// >>> try:
    /// ...     comm.all_reduce(gradients)
    /// ... except unisono.Error:
    /// ...     comm = comm.shrink().grow()
    #[pyo3(signature = (world_size=None, *, url=None, timeout=None))]
    fn grow(
        &self,
        py: Python<'_>,
        world_size: Option<i64>,
        url: Option<String>,
        timeout: Option<Seconds>,
    ) -> PyResult<Self> {
        let world = world_size
            .map(|world| {
                usize::try_from(world)
                    .map_err(|_| invalid(py, format!("grow: a world size of {world} is none")))
            })
            .transpose()?;
        let place = url.map(MeetingPlace::Url);
        let usual = self.core().config().join_timeout.duration();
        let patience = timeout.map_or(usual, |Seconds(limit)| limit);
        let shared = Arc::clone(&self.shared);
        let grow = move || Ok(Shared::register(shared.comm.grow(place, world, patience)?));
        let interrupt = || self.core().abort("interrupted in grow");
        elsewhere(py, grow, interrupt).map(|shared| Self { shared })
    }

    /// The ranks that came when this communicator formed: all of them if `init` made it, those that came
    /// to the others if `grow` did, else none.
    #[getter]
    fn newcomers(&self) -> Vec<usize> {
        self.core().newcomers().to_vec()
    }

    /// Of a communicator that `shrink` or `mask` made: the number that each of its ranks had before; else None.
    #[getter]
    fn former_ranks(&self) -> Option<Vec<usize>> {
        self.core().former_ranks().map(<[usize]>::to_vec)
    }

    /// Of a communicator that `shrink` or `mask` made: up to this number, counted from 1, the collectives of the
    /// communicator before had ended on all of its ranks; else None.
    #[getter]
    fn former_ended(&self) -> Option<u64> {
        self.core().former_ended()
    }

    /// Up to this number, counted from 1, the collectives have ended here. It stays after a failure.
    #[getter]
    fn ended(&self) -> u64 {
        self.core().ended()
    }

    /// Wait until every rank has called it; a failure names every rank that is missing.
    ///
    /// It takes longer than `barrier` and is meant for finding out which ranks are late.
    ///
    /// Parameters
    /// ----------
    /// timeout : float or datetime.timedelta, optional
    ///     How many seconds to wait. Without it, the communicator's timeout.
    /// report_all : bool, optional
    ///     Name all missing ranks instead of the first one.
    ///
    /// Raises
    /// ------
    /// TimeoutError
    ///     Not every rank came; on rank 0 it names those that are missing. The communicator is then dead.
    #[pyo3(signature = (timeout=None, report_all=true))]
    fn monitored_barrier(
        &self,
        py: Python<'_>,
        timeout: Option<Seconds>,
        report_all: bool,
    ) -> PyResult<()> {
        let shared = Arc::clone(&self.shared);
        let limit = match timeout {
            Some(Seconds(limit)) => limit,
            None if self.core().timeout().is_zero() => Config::default().timeout.duration(),
            None => self.core().timeout(),
        };
        let wait = move || shared.comm.monitored_barrier(limit, report_all);
        elsewhere(py, wait, || {
            self.core().abort("interrupted in monitored_barrier")
        })
    }

    /// End every operation on every rank with an `AbortedError`. The communicator is then dead.
    ///
    /// Parameters
    /// ----------
    /// reason : str, optional
    ///     Why, for the message of the error.
    #[pyo3(signature = (reason="abort() was called"))]
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.core().abort(reason));
    }

    /// Leave the group in good order.
    ///
    /// Operations in streams of CUDA devices are waited for. Others of this rank that are still under
    /// way fail; what was sent can still be received. Closing twice is fine, and whatever is still
    /// open when the interpreter ends is closed then.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let finished = finish(py, self.core());
        py.detach(|| self.shared.close());
        finished
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        if let Some(kind) = exception.iter().next().filter(|kind| !kind.is_none()) {
            let name: String = kind.getattr("__name__")?.extract()?;
            self.abort(py, &format!("an exception: {name}"));
        }
        self.close(py)
    }

    fn __repr__(&self) -> String {
        format!(
            "<unisono.Communicator rank {} of {}>",
            self.rank(),
            self.world_size()
        )
    }
}
