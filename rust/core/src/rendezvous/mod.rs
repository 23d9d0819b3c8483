//! How the ranks of a job find and trust each other.
//!
//! A [`launcher`] says which rank this process is and where rank 0 is. Through a [`store`] there (the built-in
//! [TCP store](tcp_store), a [shared file](file_store), the [memory] of one process, or torch's) the ranks
//! [introduce](roster) themselves to each other and learn each other's public keys, with which every later connection
//! proves that it belongs to the group.

pub mod file_store;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
pub mod introduction;
pub mod launcher;
mod meeting;
pub mod memory;
pub(crate) mod pairing;
mod records;
pub mod roster;
pub mod secret;
pub mod store;
mod tcp;
pub mod unique_id;

pub use meeting::{Meeting, MeetingPlace, open_url};
pub use tcp::{server as tcp_server, store as tcp_store};

/// A rank that needs the store of its meeting no longer sets the key that begins so and ends with its number, to the
/// number of ranks.
const LEFT: &str = "left/";

fn left_key(rank: crate::types::Rank) -> String {
    format!("{LEFT}{rank}")
}
