//! How the ranks of a job find and trust each other.
pub mod file_store;
pub mod memory;
pub mod store;
