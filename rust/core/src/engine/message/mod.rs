//! Point-to-point messages: frames, matching, sends and receives.

pub(crate) mod blocking;
pub(crate) mod frame;
pub(crate) mod matching;
