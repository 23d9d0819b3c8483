//! Stream memory operations: a stream writes a word, or waits until a word is what it should be.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

use crate::abi::{
    BatchMemOp, MEMORY_OP_BARRIER, MEMORY_OP_FLUSH, MEMORY_OP_WAIT_32, MEMORY_OP_WAIT_64,
    MEMORY_OP_WRITE_32, MEMORY_OP_WRITE_64, WAIT_AND, WAIT_EQ, WAIT_FLUSH, WAIT_GEQ, WAIT_NOR,
};
use crate::context::Context;
use crate::faults;
use crate::memory;
use crate::settings::settings;
use crate::status::{Outcome, Status};

/// One of them, checked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemoryOperation {
    Write {
        address: u64,
        value: u64,
        wide: bool,
    },
    Wait {
        address: u64,
        value: u64,
        wide: bool,
        test: u32,
    },
    Barrier,
}

/// A wait sleeps in the kernel until a write of another stream, in any process, wakes it, but looks again this often: the
/// host's own stores do not wake it.
const LOOK_AGAIN: Duration = Duration::from_micros(500);

impl MemoryOperation {
    /// Checks what a caller asks for.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` when there are no memory operations, or no such; `INVALID_VALUE` for an address that streams
    /// cannot use or that is no multiple of the word, and for unknown flags.
    pub(crate) fn new(asked: &BatchMemOp) -> Outcome<Self> {
        if !settings().memory_operations {
            return Err(Status::NOT_SUPPORTED);
        }
        let &BatchMemOp {
            operation,
            address,
            value,
            flags,
            ..
        } = asked;
        let wide = matches!(operation, MEMORY_OP_WAIT_64 | MEMORY_OP_WRITE_64);
        let value = if wide { value } else { value & 0xffff_ffff };
        match operation {
            MEMORY_OP_WAIT_32 | MEMORY_OP_WAIT_64 => {
                check(address, wide)?;
                match flags {
                    WAIT_GEQ | WAIT_EQ | WAIT_AND | WAIT_NOR => Ok(Self::Wait {
                        address,
                        value,
                        wide,
                        test: flags,
                    }),
                    _ if flags & WAIT_FLUSH != 0 => Err(Status::NOT_SUPPORTED),
                    _ => Err(Status::INVALID_VALUE),
                }
            }
            MEMORY_OP_WRITE_32 | MEMORY_OP_WRITE_64 => {
                check(address, wide)?;
                // The flag that leaves the barrier out is not supported by these versions of the calls.
                match flags {
                    0 => Ok(Self::Write {
                        address,
                        value,
                        wide,
                    }),
                    _ => Err(Status::INVALID_VALUE),
                }
            }
            MEMORY_OP_BARRIER if asked.barrier_flags <= 1 => Ok(Self::Barrier),
            MEMORY_OP_FLUSH => Err(Status::NOT_SUPPORTED),
            _ => Err(Status::INVALID_VALUE),
        }
    }
}

fn check(address: u64, wide: bool) -> Outcome {
    let bytes = if wide { 8 } else { 4 };
    let (region, offset) = memory::find(address).ok_or(Status::INVALID_VALUE)?;
    if address.is_multiple_of(bytes) && offset + bytes as usize <= region.bytes {
        Ok(())
    } else {
        Err(Status::INVALID_VALUE)
    }
}

/// Words that streams have written and awaited so far.
static WRITES: AtomicUsize = AtomicUsize::new(0);
static WAITS: AtomicUsize = AtomicUsize::new(0);

/// How many words streams have written, and awaited.
pub(crate) fn counts() -> (usize, usize) {
    (
        WRITES.load(Ordering::Relaxed),
        WAITS.load(Ordering::Relaxed),
    )
}

/// Does them one after the other.
pub(crate) fn execute(context: &Context, operations: &[MemoryOperation]) -> Outcome {
    for operation in operations {
        match *operation {
            MemoryOperation::Barrier => fence(Ordering::SeqCst),
            MemoryOperation::Write {
                address,
                value,
                wide,
            } => {
                WRITES.fetch_add(1, Ordering::Relaxed);
                faults::delay("write");
                faults::occur("write")?;
                Word::at(context, address, wide)?.write(value);
            }
            MemoryOperation::Wait {
                address,
                value,
                wide,
                test,
            } => {
                WAITS.fetch_add(1, Ordering::Relaxed);
                faults::delay("wait");
                faults::occur("wait")?;
                let word = Word::at(context, address, wide)?;
                context.while_waiting(|| wait(context, &word, value, test));
            }
        }
    }
    Ok(())
}

/// Ends early when the context breaks, as nothing more is executed then.
fn wait(context: &Context, word: &Word, value: u64, test: u32) {
    let mut looks = 0_u32;
    while !word.passes(value, test) && !context.is_broken() {
        looks += 1;
        if looks < 50 {
            std::thread::yield_now();
        } else {
            word.sleep_unless(|| word.passes(value, test));
        }
    }
}

/// A word that others, in this process and others, read and write.
enum Word {
    Narrow(&'static AtomicU32),
    Wide(&'static AtomicU64),
}

impl Word {
    fn at(context: &Context, address: u64, wide: bool) -> Outcome<Self> {
        let at = memory::reach(context, address, if wide { 8 } else { 4 })?;
        // SAFETY: `reach` found the word within a region and the call checked that it is aligned. The region stays while
        // its context has work, which this is; the reference goes before the work ends. All other uses of the word are
        // atomic accesses: that is what a flag is.
        Ok(unsafe {
            if wide {
                Self::Wide(&*(at as *const AtomicU64))
            } else {
                Self::Narrow(&*(at as *const AtomicU32))
            }
        })
    }

    /// Writes after everything the stream did before.
    fn write(&self, value: u64) {
        match self {
            Self::Narrow(word) => word.store(value as u32, Ordering::SeqCst),
            Self::Wide(word) => word.store(value, Ordering::SeqCst),
        }
        // SAFETY: the call uses the address only as a name to find sleepers by.
        unsafe {
            libc::syscall(libc::SYS_futex, self.low(), libc::FUTEX_WAKE, i32::MAX);
        }
    }

    fn passes(&self, value: u64, test: u32) -> bool {
        match self {
            Self::Narrow(word) => {
                let (now, value) = (word.load(Ordering::SeqCst), value as u32);
                match test {
                    WAIT_GEQ => now.wrapping_sub(value).cast_signed() >= 0,
                    WAIT_EQ => now == value,
                    WAIT_AND => now & value != 0,
                    _ => !(now | value) != 0,
                }
            }
            Self::Wide(word) => {
                let now = word.load(Ordering::SeqCst);
                match test {
                    WAIT_GEQ => now.wrapping_sub(value).cast_signed() >= 0,
                    WAIT_EQ => now == value,
                    WAIT_AND => now & value != 0,
                    _ => !(now | value) != 0,
                }
            }
        }
    }

    /// The half that futexes know the word by.
    fn low(&self) -> *const u32 {
        match self {
            Self::Narrow(word) => word.as_ptr(),
            Self::Wide(word) => word.as_ptr().cast(),
        }
    }

    /// Sleeps until a stream writes the word, or it is time to look again.
    fn sleep_unless(&self, passes: impl Fn() -> bool) {
        // SAFETY: the low half of the word is readable like the word itself.
        let seen = unsafe { AtomicU32::from_ptr(self.low().cast_mut()) }.load(Ordering::SeqCst);
        if passes() {
            return;
        }
        let time = libc::timespec {
            tv_sec: 0,
            tv_nsec: LOOK_AGAIN.subsec_nanos().into(),
        };
        // SAFETY: the word is mapped, `time` outlives the call. The memory may be another process's, so the futex is not
        // a private one.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.low(),
                libc::FUTEX_WAIT,
                seen,
                &raw const time,
            );
        }
    }
}
