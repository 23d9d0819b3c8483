//! Links between hosts: see [`link`].

mod keepalive;
pub mod link;

pub use link::TcpLink;
