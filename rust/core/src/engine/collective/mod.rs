//! Collectives: a request becomes a plan, and a plan runs over links or in shared memory.

pub(crate) mod bounce;
pub(crate) mod buffers;
pub(crate) mod elements;
pub(crate) mod header;
pub(crate) mod operands;
pub(crate) mod pair_counts;
pub(crate) mod plan_cache;
pub(crate) mod plan_key;
pub(crate) mod request;
pub(crate) mod run;
pub(crate) mod shared;
pub(crate) mod transfer;
