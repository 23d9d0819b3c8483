//! The core's log lines: to a function of the program, or to standard error.

use std::ffi::{c_char, c_void};
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};
use unisono::config::{Config, LogLevel};
use unisono::error::{Error, Result};

use crate::error::Status;
use crate::fence::{fence, text};

/// `unisono_log_level`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct LevelNumber(pub u32);

/// `unisono_log_function`.
pub type LogFunction =
    Option<unsafe extern "C" fn(context: *mut c_void, level: LevelNumber, message: *const c_char)>;

const OFF: u32 = 0;
const ERROR: u32 = 1;
const WARN: u32 = 2;
const INFO: u32 = 3;
const DEBUG: u32 = 4;
/// No level has been set.
const UNDECIDED: u32 = u32::MAX;

/// Up to which level lines are written.
static LEVEL: AtomicU32 = AtomicU32::new(UNDECIDED);
static SINK: RwLock<Sink> = RwLock::new(Sink::StandardError);

/// Where lines go. Locked while one is written, so that a function that was replaced is not called any more.
enum Sink {
    StandardError,
    Function(
        unsafe extern "C" fn(*mut c_void, LevelNumber, *const c_char),
        Context,
    ),
}

struct Context(*mut c_void);

// SAFETY: the header says that the function is called on any thread, with this.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Begins to tell at the level of the process's first communicator, unless `unisono_log_set` said otherwise.
pub(crate) fn start(config: &Config) {
    let level = match config.log {
        LogLevel::Off => OFF,
        LogLevel::Error => ERROR,
        LogLevel::Warn => WARN,
        LogLevel::Info => INFO,
        LogLevel::Debug => DEBUG,
    };
    let decided = LEVEL.compare_exchange(UNDECIDED, level, Ordering::Relaxed, Ordering::Relaxed);
    if decided.is_ok() {
        install();
    }
}

/// A program in Rust that links this statically may have a subscriber of its own, which it keeps.
fn install() {
    let _ = tracing::subscriber::set_global_default(Teller);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_log_set(
    function: LogFunction,
    context: *mut c_void,
    level: LevelNumber,
) -> Status {
    fence(|| {
        check(level)?;
        *SINK.write().unwrap_or_else(PoisonError::into_inner) = match function {
            Some(function) => Sink::Function(function, Context(context)),
            None => Sink::StandardError,
        };
        LEVEL.store(level.0, Ordering::Relaxed);
        install();
        Ok(())
    })
}

fn check(level: LevelNumber) -> Result<()> {
    if level.0 > DEBUG {
        return Err(Error::invalid(format!(
            "{} is no unisono_log_level",
            level.0
        )));
    }
    Ok(())
}

const fn number(level: &Level) -> u32 {
    match *level {
        Level::ERROR => ERROR,
        Level::WARN => WARN,
        Level::INFO => INFO,
        _ => DEBUG,
    }
}

/// The subscriber.
struct Teller;

impl Subscriber for Teller {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> tracing::subscriber::Interest {
        // The level may change at any time.
        tracing::subscriber::Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let level = LEVEL.load(Ordering::Relaxed);
        metadata.is_event() && level != UNDECIDED && number(metadata.level()) <= level
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let level = number(event.metadata().level());
        tell(level, format!("{}{}", line.message, line.fields));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

fn tell(level: u32, line: String) {
    match &*SINK.read().unwrap_or_else(PoisonError::into_inner) {
        Sink::StandardError => {
            let name = ["", "error", "warning", "info", "debug"][level as usize];
            // Many ranks share a terminal: a line must go out in one call. If it is closed, the line is lost.
            let _ = std::io::stderr().write_all(format!("unisono: {name}: {line}\n").as_bytes());
        }
        Sink::Function(function, context) => {
            let line = text(line);
            // SAFETY: what the header promises to the function.
            unsafe { function(context.0, LevelNumber(level), line.as_ptr()) }
        }
    }
}

/// An event as text: `message key=value ...`.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
