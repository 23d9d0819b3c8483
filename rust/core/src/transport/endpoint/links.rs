//! The links' constructors.
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, SendFlags};

use crate::error::Result;
use crate::transport::{Interest, Link, Notice, PeerState};

struct Plain {
    data: OwnedFd,
    #[expect(dead_code, reason = "held open")]
    control: Option<OwnedFd>,
    name: String,
}

impl Link for Plain {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
        Ok(
            rustix::net::send(&self.data, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
                .unwrap_or(0),
        )
    }
    fn try_recv(&mut self, bytes: &mut [u8]) -> Result<usize> {
        Ok(rustix::net::recv(&self.data, bytes, RecvFlags::DONTWAIT).map_or(0, |(_, n)| n))
    }
    fn try_fold(&mut self, _: usize, _: usize, _: &mut dyn FnMut(&[u8])) -> Result<usize> {
        Ok(0)
    }
    fn arm(&mut self, _: Interest) -> bool {
        false
    }
    fn disarm(&mut self) {}
    fn fds(&self) -> Vec<RawFd> {
        vec![self.data.as_raw_fd()]
    }
    fn peer_state(&mut self) -> PeerState {
        PeerState::Present
    }
    fn send_abort(&mut self, _: &Notice) {}
    fn send_farewell(&mut self) {}
    fn describe(&self) -> String {
        self.name.clone()
    }
}

pub(super) fn create_shm(control: UnixStream, capacity: usize) -> Result<(Box<dyn Link>, OwnedFd)> {
    let fd = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, capacity as u64).unwrap();
    Ok((
        Box::new(Plain {
            data: control.into(),
            control: None,
            name: "shared memory".into(),
        }),
        fd,
    ))
}

pub(super) fn open_shm(control: UnixStream, segment: OwnedFd) -> Result<Box<dyn Link>> {
    Ok(Box::new(Plain {
        data: control.into(),
        control: Some(segment),
        name: "shared memory".into(),
    }))
}

pub(super) fn tcp(data: TcpStream, control: TcpStream, peer: String) -> Result<Box<dyn Link>> {
    Ok(Box::new(Plain {
        data: data.into(),
        control: Some(control.into()),
        name: format!("tcp {peer}"),
    }))
}
