//! The operations of streams: each carries all it needs, so that a graph can do it again.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::abi::HostFunction;
use crate::context::Context;
use crate::faults;
use crate::graph::Executable;
use crate::memory;
use crate::memory_operations::{self, MemoryOperation};
use crate::module::Launch;
use crate::point::Point;
use crate::status::Outcome;

/// One thing a stream does.
#[derive(Clone)]
pub(crate) enum Operation {
    /// Nothing: it marks a place.
    Nothing,
    /// Waits until other streams have reached places.
    Await(Arc<Point>),
    Copy {
        to: Place,
        from: Source,
        bytes: usize,
    },
    /// Repeats the first `width` bytes of the pattern.
    Fill {
        to: Place,
        pattern: [u8; 4],
        width: usize,
        bytes: usize,
    },
    Memory(Vec<MemoryOperation>),
    Kernel(Launch),
    Host(HostCall),
    Graph(Arc<Executable>),
}

/// An address as the caller gave it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// Memory that the driver knows, looked up when the stream gets there.
    Known(u64),
    /// Host memory that it does not; the caller of the copy waits until it is done.
    Pageable(usize),
}

/// Where bytes come from.
#[derive(Clone)]
pub(crate) enum Source {
    At(Place),
    /// The content of pageable memory at the call.
    Staged(Arc<[u8]>),
}

/// A function of the caller's, with its argument.
#[derive(Clone, Copy)]
pub(crate) struct HostCall {
    pub(crate) function: HostFunction,
    pub(crate) argument: usize,
}

/// One thread runs host functions in the driver, so they are never at the same time.
static HOST_FUNCTIONS: Mutex<()> = Mutex::new(());

impl Operation {
    /// The name under which faults and delays know it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Nothing => "mark",
            Self::Await(_) => "await",
            Self::Copy { .. } => "copy",
            Self::Fill { .. } => "fill",
            Self::Memory(_) => "memory",
            Self::Kernel(_) => "kernel",
            Self::Host(_) => "host",
            Self::Graph(_) => "graph",
        }
    }

    /// Does it, in the thread of its stream.
    ///
    /// # Errors
    /// What breaks the context: an address that cannot be reached, a fault that was asked for.
    pub(crate) fn execute(&self, context: &Arc<Context>) -> Outcome {
        faults::delay(self.name());
        faults::occur(self.name())?;
        match self {
            Self::Nothing => Ok(()),
            Self::Await(point) => {
                point.wait();
                Ok(())
            }
            Self::Copy { to, from, bytes } => copy(context, *to, from, *bytes),
            Self::Fill {
                to,
                pattern,
                width,
                bytes,
            } => {
                let to = to.reach(context, *bytes)? as *mut u8;
                for at in 0..*bytes {
                    // SAFETY: `reach` found all of these bytes in one region, which stays while its context has work.
                    unsafe { to.add(at).write(pattern[at % width]) };
                }
                Ok(())
            }
            Self::Memory(operations) => memory_operations::execute(context, operations),
            Self::Kernel(launch) => launch.execute(context),
            Self::Host(call) => {
                let _one = HOST_FUNCTIONS.lock();
                crate::call::as_host_function(|| (call.function)(call.argument as *mut _));
                Ok(())
            }
            Self::Graph(graph) => graph.execute(context),
        }
    }
}

impl Place {
    fn reach(self, context: &Context, bytes: usize) -> Outcome<usize> {
        match self {
            Self::Known(address) => memory::reach(context, address, bytes),
            Self::Pageable(address) => Ok(address),
        }
    }
}

fn copy(context: &Context, to: Place, from: &Source, bytes: usize) -> Outcome {
    let to = to.reach(context, bytes)? as *mut u8;
    let from = match from {
        Source::At(place) => place.reach(context, bytes)? as *const u8,
        Source::Staged(staged) => staged.as_ptr(),
    };
    // SAFETY: `reach` found these bytes in regions, which stay while their context has work; staged bytes are the
    // operation's own; pageable memory is the caller's, which waits for the copy and keeps it valid. The ranges may
    // overlap. Other processes and threads may write the same bytes meanwhile, as with a real device: what
    // is then copied is anything, and nothing here interprets it.
    unsafe { std::ptr::copy(from, to, bytes) };
    Ok(())
}
