//! The arithmetic, which [`unisono_reduce`] has, and threads that share long passes of it.

mod workers;

pub use unisono_reduce::{Kernel, Source, Streaming, copy, copy_hinted, scale};
pub(crate) use unisono_reduce::{copy_raw, int8, last_level_cache};
pub use workers::Workers;
