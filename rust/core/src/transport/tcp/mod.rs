//! Links between hosts: see [`link`].

pub(super) mod keepalive;
pub mod link;
mod unsent;

pub use link::TcpLink;
