//! The built-in TCP store: the client of every rank ([`store`]), the [`server`] of rank 0 with the thread that serves
//! (`service`), one connection there (`connection`), what connections may make it keep (`bounds`), and what goes over one
//! (`wire`).

mod bounds;
mod connection;
pub mod server;
mod service;
pub mod store;
pub(super) mod wire;
