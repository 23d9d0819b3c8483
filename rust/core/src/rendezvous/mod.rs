//! How the ranks of a job find and trust each other.
pub mod file_store;
pub mod memory;
pub mod store;
pub mod tcp_server;
pub mod tcp_store;
