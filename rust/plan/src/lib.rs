//! A collective, on one rank, as data: a list of steps over spans of buffers.
//!
//! A plan is made by a pure function of the [`Shape`] of the request, so that it can be proved correct,
//! simulated and cached without a socket (see [`check`]). It is *sequential*: its meaning is that of running
//! its steps one after the other. The executor may overlap a step with earlier unfinished ones when they
//! share no link direction and no bytes (two reads are fine), within a window of at least [`MIN_WINDOW`]
//! steps. Pipelining falls out of that; authors of algorithms never write it. With a window of one, exchanges
//! deadlock on links that hold nothing, which is why the window is at least two: the usual `Send` then `Recv`
//! pair of an exchange progresses at once.
//!
//! # Buffers and element types
//!
//! `Input` and `Output` hold elements of the request's type. `Scratch` belongs to the plan and holds elements
//! of the *accumulation* type. In a collective that reduces, that is float32 for the 16-bit and 8-bit floats
//! and the same type for all others; in one that only moves elements it is the request's own type, always, so
//! that the detour through `Scratch` keeps every bit (a NaN's payload too). A message carries the elements of
//! the span it was sent from: [`Wire::Element`] from `Input` and `Output`, [`Wire::Partial`] from `Scratch`.
//! `Copy` between `Scratch` and the others converts.
//!
//! # Windows
//!
//! Ranks of one host also meet in [`Buffer::Window`], memory that all of them map: [`windows`] makes such plans. No
//! message orders their steps, so they signal and wait, and an executor takes their steps [in order](Order::InOrder).
//! Where their buffers lie in memory that all of them map, they [lend](Plan::lends) them to each other: [`in_place`].
//!
//! # Algorithms
//!
//! Each has a file with its plans and its row of this table ([`Family`]): what it serves, and what it costs.
//!
//! # Making one
//!
//! [`select::select`] names the algorithm that [`cost::predict`] finds cheapest, [`build`] makes this rank's
//! plan by it; [`check::verify`] proves a new algorithm.
//!
//! # Messages of no elements
//!
//! They are left out on both sides, except in a barrier, which has no others. But sender and receiver leave out the same
//! only if they were given the same counts, and a rank that leaves out all of its messages never learns that it was not.
//!
//! - Where all ranks should know all counts, and they are per rank or zero, the first message in each direction of each
//!   link is always sent: every message shows both sides whether they agree.
//! - Where two ranks alone know what goes between them ([`Collective::is_between_pairs`]), nothing is sent for nothing.
//!   An exchange with few neighbours costs what the neighbours cost, in messages and in links, however many ranks there
//!   are. That one side has something where the other has nothing is found beside the messages, by the engine.
#![forbid(unsafe_code)]

mod bruck;
mod build;
mod builder;
pub mod check;
pub mod cost;
mod direct;
mod doubling;
pub mod explain;
mod family;
mod halving;
pub mod hierarchical;
pub mod in_memory;
pub mod in_place;
pub mod links;
mod piece;
mod ring;
mod rounds;
pub mod select;
mod shape;
pub mod shared;
pub mod signals;
pub mod simulate;
pub mod staged;
mod step;
#[cfg(test)]
mod tests;
pub mod topology;
mod tree;
mod types;
pub mod windows;

pub use self::build::{applicable, applicable_on, build, build_chunked, build_on};
use self::family::Family;
pub use self::piece::piece_length;
pub use self::rounds::rounds;
pub use self::shape::{Counts, Shape};
pub use self::step::{Buffer, DEFAULT_CHUNK, Order, Plan, Sources, Span, Step, Wire};
pub use self::types::{Algorithm, Collective, Rank};

/// The smallest number of steps that an executor must be willing to have unfinished at once.
pub const MIN_WINDOW: usize = 2;

/// The row of an algorithm.
fn family(algorithm: Algorithm) -> &'static Family {
    match algorithm {
        Algorithm::Direct => &direct::DIRECT,
        Algorithm::TwoShot => &direct::TWO_SHOT,
        Algorithm::Ring => &ring::FAMILY,
        Algorithm::Tree => &tree::FAMILY,
        Algorithm::RecursiveDoubling => &doubling::FAMILY,
        Algorithm::Halving => &halving::FAMILY,
        Algorithm::Bruck => &bruck::FAMILY,
        Algorithm::Hierarchical => &hierarchical::FAMILY,
        Algorithm::Windows => &windows::FAMILY,
        Algorithm::InPlace => &in_place::FAMILY,
    }
}
