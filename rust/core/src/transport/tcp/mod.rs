//! Links between hosts: see [`link`].

pub mod link;

pub use link::TcpLink;
