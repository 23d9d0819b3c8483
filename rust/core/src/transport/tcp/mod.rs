//! Links between hosts: see [`link`].

pub(super) mod keepalive;
pub mod link;

pub use link::TcpLink;
