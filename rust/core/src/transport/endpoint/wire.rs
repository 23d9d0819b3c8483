//! Bounded waiting on one socket: every read, write and connect ends by its deadline or when it is called off.
//!
//! All calls pass `MSG_DONTWAIT`, so they work whatever mode a link has put the shared socket in.

use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, send, sendmsg,
};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use super::turns::Turn;
use crate::transport::shm::credentials;
use crate::transport::tcp::keepalive;
use crate::users;

use crate::fork;

/// How often a wait looks whether it was called off.
const SLICE: Duration = Duration::from_millis(50);

/// Until when to wait, and what calls the wait off.
#[derive(Clone, Copy)]
pub(super) struct Patience<'a> {
    pub(super) deadline: Instant,
    pub(super) called_off: [&'a AtomicBool; 2],
    /// The turn that goes to another job if the waits take long.
    pub(super) turn: Option<&'a Turn>,
}

/// Why a wait ended without what it waited for.
#[derive(Debug)]
pub(super) enum Cut {
    /// The other side closed the connection, or it broke.
    Closed,
    /// No process listens there.
    Refused,
    /// The deadline passed.
    TimedOut,
    /// The other side's host has not answered for as long as it may be silent.
    Silent,
    /// It was called off.
    CalledOff,
    /// The system refused.
    System(io::Error),
}

/// The descriptors that go with a link through shared memory.
#[derive(Clone, Copy)]
pub(super) struct Files<T> {
    pub(super) segment: Option<T>,
    /// The sign of the sender's life.
    pub(super) life: Option<T>,
    /// A socket by which the two processes open further links.
    pub(super) introduction: Option<T>,
}

impl<T> Files<T> {
    /// A byte with a bit for each that there is, and those in the same order.
    fn parts(&self) -> (u8, Vec<T>)
    where
        T: Copy,
    {
        let all = [self.segment, self.life, self.introduction];
        let bits = all.iter().enumerate();
        let which = bits.map(|(bit, file)| u8::from(file.is_some()) << bit);
        (which.sum(), all.into_iter().flatten().collect())
    }

    /// As many as have come: a process that has few descriptors left gets the first of them.
    fn of_parts(which: u8, mut files: impl Iterator<Item = T>) -> Self {
        let mut next = |bit: u8| (which & 1 << bit != 0).then(|| files.next()).flatten();
        Self {
            segment: next(0),
            life: next(1),
            introduction: next(2),
        }
    }
}

impl From<io::Error> for Cut {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => Self::Refused,
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => Self::Closed,
            // The kernel ended the connection. A passed deadline of this side does not come here: `Patience::left` finds it.
            io::ErrorKind::TimedOut => Self::Silent,
            _ => Self::System(error),
        }
    }
}

impl From<Errno> for Cut {
    fn from(error: Errno) -> Self {
        io::Error::from(error).into()
    }
}

impl Patience<'_> {
    /// The time that is left.
    ///
    /// # Errors
    /// When nothing is left, or the wait was called off.
    pub(super) fn left(&self) -> Result<Duration, Cut> {
        if self
            .called_off
            .iter()
            .any(|flag| flag.load(Ordering::Acquire))
        {
            return Err(Cut::CalledOff);
        }
        match self.deadline.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Ok(left),
            _ => Err(Cut::TimedOut),
        }
    }

    fn wait_again(&self) {
        if let Some(turn) = self.turn {
            turn.waits();
        }
    }

    /// Sleeps for `time`, or less.
    pub(super) fn sleep(&self, time: Duration) -> Result<(), Cut> {
        let until = Instant::now() + time;
        while let Some(rest) = until.checked_duration_since(Instant::now()) {
            self.wait_again();
            std::thread::sleep(rest.min(SLICE).min(self.left()?));
        }
        self.left().map(drop)
    }

    /// Waits until `fd` has one of `events`, or an error or end, which the next call on it will show.
    pub(super) fn ready(&self, fd: BorrowedFd<'_>, events: PollFlags) -> Result<(), Cut> {
        loop {
            self.wait_again();
            let slice = timespec(self.left()?.min(SLICE));
            match poll(&mut [PollFd::from_borrowed_fd(fd, events)], Some(&slice)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Fills `bytes`.
    pub(super) fn read(&self, socket: impl AsFd, bytes: &mut [u8]) -> Result<(), Cut> {
        let mut filled = 0;
        while filled < bytes.len() {
            match recv(&socket, &mut bytes[filled..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(Cut::Closed),
                Ok((_, count)) => filled += count,
                Err(Errno::AGAIN) => self.ready(socket.as_fd(), PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            self.left()?;
        }
        Ok(())
    }

    /// Writes all of `bytes`.
    pub(super) fn write(&self, socket: impl AsFd, mut bytes: &[u8]) -> Result<(), Cut> {
        while !bytes.is_empty() {
            match send(&socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::AGAIN) => self.ready(socket.as_fd(), PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends descriptors, with one byte that says which they are.
    pub(super) fn send_files(
        &self,
        socket: impl AsFd,
        files: &Files<BorrowedFd<'_>>,
    ) -> Result<(), Cut> {
        let mut files = *files;
        loop {
            let (which, fds) = files.parts();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(Cut::System(io::ErrorKind::OutOfMemory.into()));
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&socket, &[IoSlice::new(&[which])], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => self.ready(socket.as_fd(), PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                // The link does without.
                Err(Errno::TOOMANYREFS) if files.life.is_some() => files.life = None,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives what [`Patience::send_files`] sent, as far as this process has descriptors left.
    pub(super) fn receive_files(&self, socket: impl AsFd) -> Result<Files<OwnedFd>, Cut> {
        loop {
            let mut byte = [0];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            match recvmsg(
                &socket,
                &mut [IoSliceMut::new(&mut byte)],
                &mut control,
                flags,
            ) {
                Ok(received) if received.bytes == 0 => return Err(Cut::Closed),
                Ok(_) => {
                    let messages = control.drain();
                    let fds = messages.filter_map(|message| match message {
                        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                        _ => None,
                    });
                    return Ok(Files::of_parts(byte[0], fds.flatten()));
                }
                Err(Errno::AGAIN) => self.ready(socket.as_fd(), PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Connects to an abstract Unix socket, waiting while its backlog is full.
    pub(super) fn connect_unix(&self, name: &[u8]) -> Result<UnixStream, Cut> {
        let mut path = vec![0];
        path.extend(name);
        let address = SockAddr::unix(OsStr::from_bytes(&path))?;
        let mut pause = Duration::from_millis(1);
        loop {
            let socket = fork::make_private(|| Socket::new(Domain::UNIX, Type::STREAM, None))?;
            socket.set_nonblocking(true)?;
            match socket.connect(&address) {
                Ok(()) => return Ok(OwnedFd::from(socket).into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.sleep(pause)?;
                    pause = (pause * 2).min(SLICE);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Connects to a TCP address. A host that does not answer is given up: after the time `now` while connecting, and after
    /// `later` seconds from then on, by the options that [`keepalive::end_when_silent`] gives the socket.
    pub(super) fn connect_tcp(
        &self,
        address: SocketAddr,
        (now, later): (Option<Duration>, Option<u32>),
    ) -> Result<TcpStream, Cut> {
        let domain = Domain::for_address(address);
        let socket = fork::make_private(|| Socket::new(domain, Type::STREAM, None))?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {
                self.await_connection(&socket, now)?;
                if let Some(error) = socket.take_error()? {
                    return Err(error.into());
                }
            }
            Err(error) => return Err(error.into()),
        }
        if let Some(seconds) = later {
            keepalive::end_when_silent(SockRef::from(&socket), seconds)?;
        }
        let stream: TcpStream = socket.into();
        // On a port of the ephemeral range TCP may connect a socket to itself while nothing listens there.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(Cut::Refused);
        }
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// The kernel goes on asking a host that does not answer for two minutes.
    fn await_connection(&self, socket: &Socket, silence: Option<Duration>) -> Result<(), Cut> {
        let limit = silence.map(|silence| Instant::now() + silence);
        let Some(limit) = limit.filter(|limit| *limit < self.deadline) else {
            return self.ready(socket.as_fd(), PollFlags::OUT);
        };
        let patience = Patience {
            deadline: limit,
            ..*self
        };
        match patience.ready(socket.as_fd(), PollFlags::OUT) {
            Err(Cut::TimedOut) => Err(Cut::Silent),
            result => result,
        }
    }
}

/// The user of the process at the other end of a Unix socket, in words, if it is not this process's: memory is shared
/// within one user only. The kernel says so of the moment of the connection, or of the call of listen.
pub(super) fn foreign_user(socket: &UnixStream) -> Option<String> {
    match credentials(socket) {
        Ok(peer) if users::is_own(peer.uid) => None,
        Ok(peer) => {
            let own = rustix::process::geteuid().as_raw();
            Some(format!(
                "{}, and this process to user {own}",
                users::name(peer.uid)
            ))
        }
        Err(error) => Some(format!("a user that the system does not tell ({error})")),
    }
}

/// Whether the other side has closed, without reading anything.
pub(super) fn has_ended(socket: impl AsFd) -> bool {
    let now = timespec(Duration::ZERO);
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    matches!(poll(&mut fds, Some(&now)), Ok(count) if count > 0)
}

/// A duration as the system takes it.
pub(super) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::skips::skipped;

    /// The system chooses the near port of a connection from a range. Where that is the far port of a connection to this
    /// host at which nothing listens, TCP connects the socket to itself.
    #[test]
    fn a_socket_that_is_connected_to_itself_is_no_peer() {
        let never = AtomicBool::new(false);
        let patience = Patience {
            deadline: Instant::now() + Duration::from_secs(60),
            called_off: [&never; 2],
            turn: None,
        };
        let any = (Ipv4Addr::LOCALHOST, 0);
        let mut found = 0;
        for _ in 0..20 {
            // A port of the range at which nothing listens from here on.
            let free = TcpStream::connect(
                std::net::TcpListener::bind(any)
                    .unwrap()
                    .local_addr()
                    .unwrap(),
            );
            let address = free.unwrap().local_addr().unwrap();
            for _ in 0..3000 {
                match patience.connect_tcp(address, (None, None)) {
                    Err(Cut::Refused) => {}
                    other => panic!("{address} answered: {other:?}"),
                }
                found += usize::from(TcpStream::connect(address).is_ok());
            }
        }
        if found == 0 {
            skipped("no socket of 60,000 was connected to itself");
        }
    }
}
