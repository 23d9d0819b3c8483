//! Links between hosts: see [`link`].

mod buffer;
mod connection;
pub(super) mod keepalive;
pub(super) mod kernel;
pub mod link;
mod streams;
pub mod stripes;

pub use link::TcpLink;
