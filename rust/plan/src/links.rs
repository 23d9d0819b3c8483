//! Constants of the engine that prices depend on: how many steps an executor has in hand, and which messages are lent.

/// Steps of a plan that may be unfinished at once.
pub const WINDOW: usize = 64;

/// Payloads from this length on are lent from the heap: below it a copy that stays in the cache costs less than waiting
/// for the return.
pub const LENT_IN_PLACE_FROM: usize = 16 << 10;

/// Payloads from this length on may be lent from memory that only `process_vm_readv` reaches: below it the system
/// call costs more than a second copy anywhere.
pub const LENT_FROM: usize = 64 << 10;
