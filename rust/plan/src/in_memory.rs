//! Plans in memory that the ranks of a host share, which [`shared`](super::shared) says when there are.

use super::shared::LINE;
use super::windows::{self, Room, Shots};
use super::{Algorithm, Plan, Shape, in_place};
use crate::types::Collective;

/// This rank's plan by [`Algorithm::Windows`] or [`Algorithm::InPlace`], in chunks of `chunk` bytes where it works in chunks.
/// `None` where it has none, and for other algorithms.
pub fn build(
    algorithm: Algorithm,
    shape: &Shape,
    element_size: usize,
    chunk: usize,
) -> Option<Plan> {
    let room = |bytes| Room {
        half: bytes / element_size,
        align: LINE / element_size,
    };
    match (algorithm, shape.collective) {
        (Algorithm::InPlace, _) => in_place::build(shape, element_size),
        (Algorithm::Windows, Collective::AllReduce) => {
            windows::build_in_step(shape, &room(2 * chunk))
        }
        (Algorithm::Windows, _) => windows::build(shape, &room(chunk), Shots::One, false),
        _ => None,
    }
}
