//! Links between hosts: see [`link`].

mod breaches;
mod buffer;
mod connection;
pub(super) mod keepalive;
pub(super) mod kernel;
mod ledger;
pub mod link;
pub mod mending;
mod streams;
pub mod stripes;

pub use link::TcpLink;
