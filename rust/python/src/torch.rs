//! The Rust half of the torch door: the bridge over which `csrc/` calls the core.
//!
//! One call goes down per operation (buffers as addresses, operator, timeout, a completion that owns the tensors)
//! and one call comes up when it ends. Codes and numbers cross instead of exceptions, because cxx keeps only the
//! text of an error; a panic becomes an `Internal` error in [`guard`], since it would otherwise end the process.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use cxx::UniquePtr;
use pyo3::prelude::*;
use unisono::buffer::Memory;
use unisono::config::{Config, DeviceFailure};
use unisono::cuda::LentStream;
use unisono::error::{Code, Error, Result};
use unisono::fence::guard;
use unisono::rendezvous::launcher;
use unisono::rendezvous::secret::Secret;
use unisono::rendezvous::store::Store;
use unisono::types::{Collective, DataType, DeviceStream, ReduceOp};
use unisono::{Communicator, Completion, PointToPoint, Request, Sizes, Work};

#[expect(unreachable_pub, reason = "cxx makes every item of a bridge public")]
mod bridge;
mod device;
mod heap;
mod interrupts;

use bridge::ffi;
use interrupts::{check_signals, give_up, status_of_wait, take_raised};

/// Puts what Python needs of the torch door into the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    interrupts::hear();
    module.add("TORCH_VERSION", ffi::torch_version())?;
    module.add_function(wrap_pyfunction!(device::device_allocator, module)?)?;
    module.add_function(wrap_pyfunction!(close_torch_groups, module)?)
}

/// Closes every process group that is still alive, and waits for the threads; called before the interpreter goes.
#[pyfunction]
fn close_torch_groups(py: Python<'_>) {
    py.detach(|| {
        ffi::close_all();
        unisono::wait_for_threads(crate::THREADS_END);
    });
}

/// How long a group that is closed waits for what is under way on devices.
const FAREWELL: Duration = Duration::from_secs(3);

/// A joined group; empty when joining failed, which the status beside it says.
struct Group(Option<Communicator>);

/// A started operation; empty when starting failed, which the status beside it says.
struct Operation(Option<Work>);

/// A stream that a group has to itself; empty when none could be had, which the status beside it says.
struct OwnStream(Option<LentStream>);

/// Joins the group that meets through the store. `numbers`: of its ranks in the whole job; none for the group of all.
fn join(
    store: &ffi::Store,
    rank: usize,
    world: usize,
    numbers: &[u64],
    settings: &[ffi::Setting],
) -> ffi::Joined {
    let joined = guard(|| {
        let mut config = Config::from_env()?;
        for setting in settings {
            config.set(&setting.name, &setting.value)?;
        }
        crate::log::start(&config);
        let store = TorchStore { store, world };
        if numbers.len() != world {
            return Communicator::join(&store, rank, world, config);
        }
        let numbers: Vec<_> = numbers.iter().map(|number| *number as usize).collect();
        Communicator::join_part(&store, (rank, &numbers), config)
    });
    as_joined(joined.map(Some))
}

fn as_joined(joined: Result<Option<Communicator>>) -> ffi::Joined {
    let (status, communicator) = match joined {
        Ok(communicator) => (ok(), communicator),
        Err(error) => (status_of_wait(&error), None),
    };
    ffi::Joined {
        status,
        group: Box::new(Group(communicator)),
    }
}

/// The group of some of the ranks; no group on the others.
fn subgroup(group: &Group, ranks: &[usize], label: &str) -> ffi::Joined {
    as_joined(group.guard(|communicator| communicator.subgroup(ranks, label.as_bytes())))
}

/// Microseconds that a call would take, by simulation; 0 when the call would be refused.
///
/// # Safety
/// As for [`run`].
unsafe fn estimate(group: &Group, call: &ffi::Call<'_>) -> f64 {
    let estimate = group.guard(|communicator| {
        // SAFETY: the caller's promise is the one asked for here.
        communicator.estimate(&unsafe { request(call)? })
    });
    estimate.map_or(0.0, microseconds)
}

fn estimate_message(group: &Group, peer: i64, bytes: usize) -> f64 {
    let estimate = group
        .guard(|communicator| Ok(communicator.estimate_message(usize::try_from(peer).ok(), bytes)));
    estimate.map_or(0.0, microseconds)
}

fn microseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// # Safety
/// The memory of `call` keeps the promise of [`Memory::from_raw_parts`] until `completion` has been called, and a
/// device's until what is in its stream now has passed.
unsafe fn start(
    group: &Group,
    call: &ffi::Call<'_>,
    completion: UniquePtr<ffi::Completion>,
) -> ffi::Started {
    started(group.guard(|communicator| {
        // SAFETY: the caller's promise is the one asked for here.
        unsafe { communicator.start(request(call)?, Some(upcall(completion))) }
    }))
}

/// # Safety
/// The memory of `call` keeps the promise of [`Memory::from_raw_parts`] until this returns.
unsafe fn run(group: &Group, call: &ffi::Call<'_>) -> ffi::Ran {
    let ran = group.guard_wait(|communicator| {
        // SAFETY: the operation has completed when `run` returns, and the caller vouches until then.
        unsafe { communicator.run(request(call)?) }
    });
    let sequence = *ran.as_ref().unwrap_or(&0);
    ffi::Ran {
        status: outcome_of_wait(ran.map(drop)),
        sequence,
    }
}

/// # Safety
/// As for [`start`].
unsafe fn send(
    group: &Group,
    message: &ffi::Message<'_>,
    completion: UniquePtr<ffi::Completion>,
) -> ffi::Started {
    started(group.guard(|communicator| {
        let to = usize::try_from(message.peer)
            .map_err(|_| Error::invalid(format!("send: rank {} is out of range", message.peer)))?;
        let options = PointToPoint {
            completion: Some(upcall(completion)),
            timeout: timeout(message.timeout_ms),
            blocking: false,
            stream: stream(message.place),
        };
        // SAFETY: the caller's promise is the one asked for here, of the memory and of its use.
        unsafe {
            let memory = memory(message.pieces);
            communicator.send(data_type(message.dtype)?, memory, to, message.tag, options)
        }
    }))
}

/// # Safety
/// As for [`start`].
unsafe fn receive(
    group: &Group,
    message: &ffi::Message<'_>,
    completion: UniquePtr<ffi::Completion>,
) -> ffi::Started {
    started(group.guard(|communicator| {
        let from = usize::try_from(message.peer).ok();
        let options = PointToPoint {
            completion: Some(upcall(completion)),
            timeout: timeout(message.timeout_ms),
            blocking: false,
            stream: stream(message.place),
        };
        // SAFETY: the caller's promise is the one asked for here, of the memory and of its use.
        unsafe {
            let memory = memory(message.pieces);
            communicator.receive(
                data_type(message.dtype)?,
                memory,
                from,
                message.tag,
                options,
            )
        }
    }))
}

/// Success if this process sees the device, which torch's word does not prove.
fn check_device(device: i32) -> ffi::Status {
    outcome(guard(|| {
        let device = u32::try_from(device)
            .map_err(|_| Error::invalid(format!("there is no device {device}")))?;
        unisono::cuda::check_device(device)
    }))
}

/// Whether what is put into a stream becomes part of a graph. Where that cannot be found out, an operation will say
/// why.
fn is_capturing(place: ffi::Place) -> bool {
    let capturing = guard(|| stream(place).map_or(Ok(false), unisono::cuda::is_capturing));
    capturing.unwrap_or(false)
}

/// A stream of a device that belongs to the caller alone until it is dropped.
fn lend_stream(device: i32) -> ffi::Lent {
    let lent = guard(|| {
        let device = u32::try_from(device)
            .map_err(|_| Error::internal(format!("a stream of the device {device}")))?;
        LentStream::of(device)
    });
    let (status, stream) = match lent {
        Ok(stream) => (ok(), Some(stream)),
        Err(error) => (status(&error), None),
    };
    ffi::Lent {
        status,
        stream: Box::new(OwnStream(stream)),
    }
}

impl OwnStream {
    /// The driver's handle of it; 0 of an empty one.
    fn handle(&self) -> usize {
        self.0.as_ref().map_or(0, |stream| stream.handle().stream)
    }
}

impl Group {
    fn guard<T>(&self, body: impl FnOnce(&Communicator) -> Result<T>) -> Result<T> {
        let communicator = self
            .0
            .as_ref()
            .ok_or_else(|| Error::internal("the group was never joined"))?;
        communicator.guard(body)
    }

    /// As [`Group::guard`], for a body that waits. A wait that a signal has ended ends what is under way elsewhere in the
    /// communicator, too.
    fn guard_wait<T>(&self, body: impl FnOnce(&Communicator) -> Result<T>) -> Result<T> {
        self.guard(|communicator| {
            body(communicator).inspect_err(|_| {
                if interrupts::is_raised() {
                    communicator.abort("interrupted");
                }
            })
        })
    }

    fn monitored_barrier(&self, timeout_ms: u64, report_all: bool) -> ffi::Status {
        let timeout = Duration::from_millis(timeout_ms);
        outcome_of_wait(self.guard_wait(|communicator| {
            let result = communicator.monitored_barrier(timeout, report_all);
            result.map_err(|error| in_torchs_words(communicator.rank(), timeout, error))
        }))
    }

    fn all_reduce_int8(&self, values: &mut [f32], average: bool) -> ffi::Status {
        let all_reduce =
            |communicator: &Communicator| communicator.all_reduce_int8(values, average);
        outcome_of_wait(self.guard_wait(all_reduce))
    }

    fn set_timeout(&self, timeout_ms: u64) {
        self.quietly(|communicator| communicator.set_timeout(Duration::from_millis(timeout_ms)));
    }

    fn sequence(&self) -> u64 {
        self.guard(|communicator| Ok(communicator.sequence()))
            .unwrap_or(0)
    }

    fn reads_devices_in_place(&self) -> bool {
        let reads = self.guard(|communicator| Ok(communicator.reads_devices_in_place()));
        reads.unwrap_or(false)
    }

    fn ends_on_device_failure(&self) -> bool {
        let setting = self.guard(|communicator| Ok(communicator.config().device_failure));
        setting.is_ok_and(|setting| setting == DeviceFailure::End)
    }

    fn error(&self) -> ffi::Status {
        outcome(self.guard(|communicator| communicator.error().map_or(Ok(()), Err)))
    }

    fn memory(&self) -> Vec<ffi::Usage> {
        let usage = self.guard(|communicator| Ok(communicator.memory()));
        let usage = usage.unwrap_or_default();
        let entry = |(name, amount): (&str, u64)| ffi::Usage {
            name: name.to_owned(),
            amount,
        };
        usage.into_iter().chain(heap::usage()).map(entry).collect()
    }

    fn abort(&self, reason: &str) {
        self.quietly(|communicator| communicator.abort(reason));
    }

    /// Messages on devices that the peer has read already may not have been noticed to be; others are given a while.
    fn close(&self) {
        self.quietly(|communicator| {
            let _ = interrupts::later(|| communicator.finish(Some(FAREWELL)));
            communicator.close();
        });
    }

    /// For what cannot fail but by a defect, which the group's next operation reports.
    fn quietly(&self, body: impl FnOnce(&Communicator)) {
        let _ = self.guard(|communicator| {
            body(communicator);
            Ok(())
        });
    }
}

impl Operation {
    fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(Work::is_done)
    }

    /// Waits for at most `timeout_ms`, for ever when it is negative.
    fn wait(&self, timeout_ms: i64) -> ffi::Status {
        outcome_of_wait(guard(|| match &self.0 {
            Some(work) => work.wait(timeout(timeout_ms)),
            None => Err(Error::internal("the operation was never started")),
        }))
    }

    /// The rank a message came from, or -1.
    fn source(&self) -> i64 {
        self.0
            .as_ref()
            .and_then(Work::source)
            .map_or(-1, |rank| rank as i64)
    }

    fn sequence(&self) -> u64 {
        self.0.as_ref().map_or(0, Work::sequence)
    }

    /// How long it took, or a negative number while it goes on.
    fn milliseconds(&self) -> f64 {
        self.0
            .as_ref()
            .and_then(Work::duration)
            .map_or(-1.0, |took| took.as_secs_f64() * 1e3)
    }
}

/// torch's store as the core sees it.
struct TorchStore<'a> {
    store: &'a ffi::Store,
    /// How many ranks the group has that meets through it.
    world: usize,
}

// SAFETY: the adapter in attach.cpp holds a `c10d::Store` and nothing else; c10d's stores take a lock of their own
// in every operation, and torch itself shares one between threads.
unsafe impl Send for TorchStore<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for TorchStore<'_> {}

impl Store for TorchStore<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        result(self.store.set(key, value))
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        // A century, which C++ can still count in nanoseconds.
        let milliseconds = timeout.as_millis().min(100 * 365 * 86_400_000) as u64;
        let fetched = self.store.wait(key, milliseconds);
        result(fetched.status).map(|()| fetched.value)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let fetched = self.store.fetch(key);
        result(fetched.status).map(|()| fetched.found.then_some(fetched.value))
    }

    fn address(&self) -> Option<SocketAddr> {
        let at = self.store.place();
        if at.host.is_empty() {
            return None;
        }
        (at.host.as_str(), at.port).to_socket_addrs().ok()?.next()
    }

    fn ends_with_rank_0(&self) -> bool {
        self.store.place().ends_with_rank_0
    }

    fn relic(&self) -> Option<String> {
        let file = self.store.place().file;
        (!file.is_empty()).then(|| format!("torch's store file {file}"))
    }

    /// torch's store knows none, but `unisono launch` gave one to its ranks.
    fn secret(&self) -> Option<Secret> {
        launcher::secret(self.world)
    }
}

/// A completion on its way to the thread that will call it.
struct Upcall(UniquePtr<ffi::Completion>);

// SAFETY: the C++ class behind it holds references to a `Work`, whose counts are atomic, and its `finish` takes the
// lock of that `Work`; it is called once, from one thread.
unsafe impl Send for Upcall {}

impl Upcall {
    fn finish(mut self, result: Result<()>) {
        if let Some(completion) = self.0.as_mut() {
            completion.finish(&outcome(result));
        }
    }
}

fn upcall(completion: UniquePtr<ffi::Completion>) -> Completion {
    let upcall = Upcall(completion);
    Box::new(move |result| upcall.finish(result))
}

/// # Safety
/// As for [`start`].
unsafe fn request(call: &ffi::Call<'_>) -> Result<Request> {
    let collective = Collective::from_number(call.collective.repr)
        .ok_or_else(|| Error::internal("an unknown collective"))?;
    let sizes = match call.layout {
        ffi::Layout::PerRank => Sizes::PerRank(call.counts.to_vec()),
        ffi::Layout::PerPair => Sizes::PerPair {
            send: call.counts.to_vec(),
            recv: call.recv_counts.to_vec(),
        },
        _ => Sizes::Even(call.count),
    };
    // SAFETY: the caller vouches for both.
    let (input, output) = unsafe {
        (
            call.has_input.then(|| memory(call.input)),
            call.has_output.then(|| memory(call.output)),
        )
    };
    Ok(Request {
        collective,
        dtype: data_type(call.dtype)?,
        op: operator(call.op, call.factor),
        root: call.root,
        input,
        output,
        sizes,
        timeout: timeout(call.timeout_ms),
        stream: stream(call.place),
        in_rank_order: false,
    })
}

/// # Safety
/// The pieces keep the promise of [`Memory::from_raw_parts`].
unsafe fn memory(pieces: &[ffi::Piece]) -> Memory {
    let mut parts = pieces
        .iter()
        .map(|piece| (piece.address as *mut u8, piece.bytes));
    // SAFETY: the caller's promise is the one asked for here.
    unsafe {
        match (parts.next(), pieces.len()) {
            (None, _) => Memory::empty(),
            (Some((start, bytes)), 1) => Memory::from_raw_parts(start, bytes),
            (Some(first), _) => Memory::from_pieces(std::iter::once(first).chain(parts)),
        }
    }
}

fn data_type(dtype: ffi::DataType) -> Result<DataType> {
    DataType::from_number(dtype.repr).ok_or_else(|| Error::internal("an unknown element type"))
}

fn operator(op: ffi::Operator, factor: f64) -> Option<ReduceOp> {
    if op == ffi::Operator::PremulSum {
        return Some(ReduceOp::PremulSum(factor));
    }
    ReduceOp::ALL
        .get(usize::from(op.repr).checked_sub(1)?)
        .copied()
}

/// The stream of a device's memory, none for the host's.
fn stream(place: ffi::Place) -> Option<DeviceStream> {
    let device = u32::try_from(place.device).ok()?;
    Some(DeviceStream {
        device,
        stream: place.stream,
    })
}

/// A limit in milliseconds, none when it is negative.
fn timeout(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}

/// The error of a monitored barrier, beginning with the sentence that users of torch look for.
fn in_torchs_words(rank: usize, timeout: Duration, mut error: Error) -> Error {
    let sentence = match (rank, error.peer) {
        (0, _) if timeout.is_zero() => "Rank 0 timed out in monitoredBarrier".to_owned(),
        (0, Some(peer)) => format!("Rank {peer} failed to pass monitoredBarrier"),
        (0, None) => return error,
        _ => format!(
            "Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for \
             send/recv from rank 0"
        ),
    };
    error.message = format!("{sentence}: {}", error.message);
    error
}

fn started(result: Result<Work>) -> ffi::Started {
    match result {
        Ok(work) => ffi::Started {
            status: ok(),
            operation: Box::new(Operation(Some(work))),
        },
        Err(error) => ffi::Started {
            status: status(&error),
            operation: Box::new(Operation(None)),
        },
    }
}

fn outcome(result: Result<()>) -> ffi::Status {
    result.map_or_else(|error| status(&error), |()| ok())
}

/// As [`outcome`], of something in which this thread may have waited.
fn outcome_of_wait(result: Result<()>) -> ffi::Status {
    result.map_or_else(|error| status_of_wait(&error), |()| ok())
}

fn ok() -> ffi::Status {
    ffi::Status {
        code: 0,
        message: String::new(),
    }
}

fn status(error: &Error) -> ffi::Status {
    ffi::Status {
        code: error.code as u8,
        message: error.to_string(),
    }
}

fn result(status: ffi::Status) -> Result<()> {
    if status.code == ffi::Code::Interrupted.repr {
        return Err(Error::new(Code::Aborted, status.message));
    }
    match Code::from_number(status.code) {
        None => Ok(()),
        Some(code) => Err(Error::new(code, status.message)),
    }
}

/// The numbers that cross the bridge are the core's.
macro_rules! same_numbers {
    ($($bridged:ident::$name:ident == $number:expr;)+) => {
        const _: () = { $(assert!(ffi::$bridged::$name.repr == $number as u8);)+ };
    };
}

same_numbers! {
    DataType::Float16 == DataType::Float16;
    DataType::BFloat16 == DataType::BFloat16;
    DataType::Float32 == DataType::Float32;
    DataType::Float64 == DataType::Float64;
    DataType::Float8E4M3 == DataType::Float8E4M3;
    DataType::Float8E5M2 == DataType::Float8E5M2;
    DataType::Int8 == DataType::Int8;
    DataType::Int16 == DataType::Int16;
    DataType::Int32 == DataType::Int32;
    DataType::Int64 == DataType::Int64;
    DataType::UInt8 == DataType::UInt8;
    DataType::UInt16 == DataType::UInt16;
    DataType::UInt32 == DataType::UInt32;
    DataType::UInt64 == DataType::UInt64;
    DataType::Bool == DataType::Bool;
    DataType::Complex64 == DataType::Complex64;
    DataType::Complex128 == DataType::Complex128;
    Operator::Sum == ReduceOp::Sum.number();
    Operator::Avg == ReduceOp::Avg.number();
    Operator::Prod == ReduceOp::Prod.number();
    Operator::Min == ReduceOp::Min.number();
    Operator::Max == ReduceOp::Max.number();
    Operator::Band == ReduceOp::Band.number();
    Operator::Bor == ReduceOp::Bor.number();
    Operator::Bxor == ReduceOp::Bxor.number();
    Operator::PremulSum == ReduceOp::PremulSum(1.0).number();
    Collective::AllReduce == Collective::AllReduce;
    Collective::Reduce == Collective::Reduce;
    Collective::Broadcast == Collective::Broadcast;
    Collective::AllGather == Collective::AllGather;
    Collective::ReduceScatter == Collective::ReduceScatter;
    Collective::Gather == Collective::Gather;
    Collective::Scatter == Collective::Scatter;
    Collective::AllToAll == Collective::AllToAll;
    Collective::Barrier == Collective::Barrier;
    Collective::Send == Collective::Send;
    Collective::Recv == Collective::Recv;
    Code::InvalidArgument == Code::InvalidArgument;
    Code::Unsupported == Code::Unsupported;
    Code::Timeout == Code::Timeout;
    Code::PeerLost == Code::PeerLost;
    Code::Mismatch == Code::Mismatch;
    Code::Aborted == Code::Aborted;
    Code::System == Code::System;
    Code::Internal == Code::Internal;
}
