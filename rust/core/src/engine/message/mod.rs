//! Point-to-point messages: which message meets which receive ([`matching`] describes the protocol).

pub(crate) mod frame;
pub(crate) mod look;
#[cfg(test)]
mod losses;
pub(crate) mod matching;
pub(crate) mod meeting;
pub(crate) mod outgoing;
pub(crate) mod peer;
mod receive;
mod send;
#[cfg(test)]
mod tests;
