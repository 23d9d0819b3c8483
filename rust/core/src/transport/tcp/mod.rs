//! Links between hosts: see [`link`].

pub(super) mod keepalive;
pub(super) mod kernel;
pub mod link;

pub use link::TcpLink;
