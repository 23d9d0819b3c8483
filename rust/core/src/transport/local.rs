//! Links inside one process, between threads that act as ranks: the rings of [`shm`](super::shm)
//! over memory that no other process sees.

use super::shm::ShmLink;
use crate::error::Result;

/// Both ends of a link with rings of `capacity` bytes (a power of two).
///
/// # Errors
/// As [`ShmLink::create`].
pub fn pair(capacity: usize) -> Result<(ShmLink, ShmLink)> {
    ShmLink::pair(capacity, "in process")
}

#[cfg(test)]
mod tests {
    use crate::transport::{Link, suite};

    fn make(capacity: usize) -> (Box<dyn Link>, Box<dyn Link>) {
        let (a, b) = super::pair(capacity).unwrap();
        (Box::new(a), Box::new(b))
    }

    suite::conformance!(make);

    #[test]
    fn there_is_a_page() {
        let (mut a, mut b) = make(4096);
        let (near, far) = (a.neighbour().unwrap(), b.neighbour().unwrap());
        // One mapping: both sides share what is registered of it.
        assert_eq!(near.page().words().as_ptr(), far.page().words().as_ptr());
    }
}
