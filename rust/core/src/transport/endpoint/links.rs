//! The links' constructors, boxed: what a connection becomes once its peer has proved itself.

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::error::Result;
use crate::transport::Link;
use crate::transport::shm::ShmLink;
use crate::transport::tcp::TcpLink;

/// The initiator's end of a link through shared memory, and the segment for the peer.
pub(super) fn create_shm(control: UnixStream, capacity: usize) -> Result<(Box<dyn Link>, OwnedFd)> {
    let (link, segment) = ShmLink::create(control, capacity)?;
    Ok((Box::new(link), segment))
}

/// The acceptor's end of a link through shared memory.
pub(super) fn open_shm(control: UnixStream, segment: OwnedFd) -> Result<Box<dyn Link>> {
    Ok(Box::new(ShmLink::open(control, segment)?))
}

/// Either end of a link over TCP.
pub(super) fn tcp(data: TcpStream, control: TcpStream, peer: String) -> Result<Box<dyn Link>> {
    Ok(Box::new(TcpLink::new(data, control, peer)?))
}
