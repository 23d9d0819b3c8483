//! The core's log lines, written to standard error.

use std::io::Write;

use tracing::level_filters::LevelFilter;
use unisono::config::{Config, LogLevel};

/// Begins to write at the level that the process's first communicator is made with. A subscriber that the program has
/// already set stays.
pub fn start(config: &Config) {
    let level = match config.log {
        LogLevel::Off => return,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_writer(|| Line(std::io::stderr()))
        .try_init();
}

/// Standard error that may be closed: its errors are ignored.
struct Line(std::io::Stderr);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // Many ranks share a terminal: a line must go out in one call.
        let _ = self.0.write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
