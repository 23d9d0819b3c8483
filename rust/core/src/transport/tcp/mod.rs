//! Links between hosts: see [`link`].

mod breaches;
mod buffer;
mod connection;
pub(super) mod keepalive;
pub(super) mod kernel;
mod ledger;
pub mod link;
pub mod mending;
mod socket;
mod streams;
pub mod stripes;

#[cfg(any(test, feature = "simulate"))]
pub(crate) use connection::Connection;
pub use link::TcpLink;
#[cfg(any(test, feature = "simulate"))]
pub(crate) use socket::Socket;
