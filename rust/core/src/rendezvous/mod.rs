//! How the ranks of a job find and trust each other.
pub mod store;
