//! One connection of a client to the [TCP store's server](super::server), from its hello to its end.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use socket2::{SockRef, TcpKeepalive};

use super::bounds::{Budget, Counted, Share};
use super::wire::{
    self, Channel, FRAME_CONTENT, FRAME_HEAD, HELLO, LONGEST_FRAME, MAGIC, MAX_REQUEST, REFUSAL,
    REPLY_HEAD, Request, StoreKey,
};

/// The bytes of a reply that the kernel keeps.
const SEND_BUFFER: usize = 128 << 10;
/// The bytes that every connection may keep uncounted, so that connections that keep much leave room for a usual request.
const FREE: usize = 40 << 10;

/// A value of the store, and what it takes of the server's budget, for as long as the store or a reply has it.
pub(super) struct Value {
    pub(super) bytes: Box<[u8]>,
    _share: Share,
}

impl Value {
    pub(super) fn new(bytes: &[u8], share: Share) -> Arc<Self> {
        Arc::new(Self {
            bytes: bytes.into(),
            _share: share,
        })
    }
}

/// A connection that has not said hello, or has not proved that the hello was its own, by then is closed.
const HELLO_TIME: Duration = Duration::from_secs(10);
/// A connection that has sent no whole request, or has not taken its reply, by then is closed; a client that was idle
/// comes again when it needs to.
const TURN_TIME: Duration = Duration::from_secs(60);

/// The stages of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its hello has not come yet.
    Greeting,
    /// Its hello was answered, but may be a copy of another's.
    Answered,
    /// It is a member's, and its next request may come.
    Ready,
    /// It waits for this key.
    Waiting(String),
    /// It has not taken its reply yet; the next request is not looked at before.
    Replying,
}

/// A connection that is to be closed: it ended, failed, or broke the protocol.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Close {
    /// It did not know the store's key.
    Stranger,
    Ended,
}

pub(super) struct Connection {
    pub(super) stage: Stage,
    /// When it entered its stage.
    pub(super) since: Instant,
    /// When its stage must have ended.
    pub(super) deadline: Option<Instant>,
    /// The events that the epoll waits for.
    pub(super) interest: EventFlags,
    stream: TcpStream,
    channel: Option<Channel>,
    /// The beginning of a hello or of a frame.
    sealed: Vec<u8>,
    /// The beginning of a request.
    request: Vec<u8>,
    reply: Reply,
    /// The part of the budget that this connection's buffers take.
    share: Share,
    _counted: Counted,
}

/// A reply that is on its way, sealed frame by frame as the client takes it.
#[derive(Default)]
struct Reply {
    head: [u8; REPLY_HEAD],
    value: Option<Arc<Value>>,
    /// How much of head and value has been sealed.
    sealed: usize,
    frame: Vec<u8>,
    /// How much of the frame has been sent.
    sent: usize,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, budget: &Budget, now: Instant) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // The connection of a client whose host is gone is closed after this time.
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(15))
            .with_interval(Duration::from_secs(5))
            .with_retries(3);
        let socket = SockRef::from(&stream);
        socket.set_tcp_keepalive(&keepalive)?;
        // Else the kernel keeps megabytes of a reply that is not read.
        socket.set_send_buffer_size(SEND_BUFFER)?;
        Ok(Self {
            stage: Stage::Greeting,
            since: now,
            deadline: Some(now + HELLO_TIME),
            interest: EventFlags::IN,
            stream,
            channel: None,
            sealed: Vec::new(),
            request: Vec::new(),
            reply: Reply::default(),
            share: budget.share(),
            _counted: Counted::new(),
        })
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    fn enter(&mut self, stage: Stage) {
        self.since = Instant::now();
        let time = match stage {
            Stage::Greeting | Stage::Answered => HELLO_TIME,
            Stage::Ready | Stage::Waiting(_) | Stage::Replying => TURN_TIME,
        };
        self.deadline = Some(self.since + time);
        self.stage = stage;
    }

    /// Reads what has arrived, up to one request. `Ok(true)`: a request is complete.
    pub(super) fn receive(&mut self, key: &StoreKey, scratch: &mut [u8]) -> Result<bool, Close> {
        while matches!(self.stage, Stage::Greeting | Stage::Answered | Stage::Ready) {
            let most = match self.stage {
                // Bytes after the hello are not read before the hello has been believed.
                Stage::Greeting => HELLO - self.sealed.len(),
                _ => scratch.len(),
            };
            let Some(count) = self.read(&mut scratch[..most])? else {
                break;
            };
            match self.stage {
                Stage::Greeting => self.greet(key, &scratch[..count])?,
                _ => self.unseal(&scratch[..count])?,
            }
            if self.has_request()? {
                return Ok(true);
            }
        }
        if matches!(self.stage, Stage::Waiting(_)) {
            // It has nothing to say before its reply; but its end must be noticed.
            if self.read(&mut scratch[..1])?.is_some() {
                return Err(Close::Ended);
            }
        }
        self.account()?;
        Ok(false)
    }

    /// `None`: nothing has arrived.
    fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, Close> {
        loop {
            match self.stream.read(into) {
                Ok(0) => return Err(Close::Ended),
                Ok(count) => return Ok(Some(count)),
                Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                Err(cause) if cause.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(_) => return Err(Close::Ended),
            }
        }
    }

    /// Takes the next bytes of the hello, and answers it when it is complete. Nothing in it is interpreted but that it
    /// proves to know the key.
    fn greet(&mut self, key: &StoreKey, bytes: &[u8]) -> Result<(), Close> {
        self.sealed.extend(bytes);
        let known = self.sealed.len().min(MAGIC.len());
        let answer = match <&[u8; HELLO]>::try_from(&self.sealed[..]) {
            Ok(hello) => wire::answer(key, hello),
            Err(_) if self.sealed[..known] == MAGIC[..known] => return Ok(()),
            Err(_) => None,
        };
        // The socket's buffer is empty and has room for this.
        let Some((channel, answer)) = answer else {
            let _ = self.stream.write(REFUSAL);
            let _ = self.stream.shutdown(Shutdown::Write);
            return Err(Close::Stranger);
        };
        match self.stream.write(&answer) {
            Ok(HELLO) => {}
            _ => return Err(Close::Ended),
        }
        self.sealed = Vec::new();
        self.channel = Some(channel);
        self.enter(Stage::Answered);
        Ok(())
    }

    /// Opens the frames that are complete with the next `bytes`.
    fn unseal(&mut self, mut bytes: &[u8]) -> Result<(), Close> {
        while !bytes.is_empty() {
            let missing = self.frame_length()? - self.sealed.len();
            let (now, later) = bytes.split_at(bytes.len().min(missing));
            self.sealed.extend(now);
            bytes = later;
            if self.sealed.len() < self.frame_length()? {
                continue;
            }
            let before = self.request.len();
            let channel = self.channel.as_mut().ok_or(Close::Ended)?;
            channel
                .open(&self.sealed[FRAME_HEAD..], &mut self.request)
                .map_err(|_| Close::Ended)?;
            self.sealed.clear();
            match self.stage {
                Stage::Answered if self.request.is_empty() => self.enter(Stage::Ready),
                // Frames without content would never come to a request, and keep the thread busy for as long as they come.
                Stage::Ready if (before + 1..=MAX_REQUEST).contains(&self.request.len()) => {}
                _ => return Err(Close::Ended),
            }
            self.account()?;
        }
        Ok(())
    }

    /// How long the frame is that has begun to come, as far as that is known: its head at least.
    fn frame_length(&self) -> Result<usize, Close> {
        let Some(&[low, high]) = self.sealed.get(..FRAME_HEAD) else {
            return Ok(FRAME_HEAD);
        };
        let length = wire::frame_length([low, high]).ok_or(Close::Ended)?;
        Ok(FRAME_HEAD + length)
    }

    fn has_request(&self) -> Result<bool, Close> {
        match Request::read(&self.request) {
            // One request at a time: nothing may follow it before the reply.
            Ok(Some(_)) if self.sealed.is_empty() => Ok(true),
            Ok(None) => Ok(false),
            _ => Err(Close::Ended),
        }
    }

    /// The bytes of the request that [`Connection::receive`] announced.
    pub(super) fn take_request(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.request)
    }

    /// Counts what this connection keeps while it waits for its client.
    fn account(&mut self) -> Result<(), Close> {
        for buffer in [&mut self.sealed, &mut self.request] {
            if buffer.is_empty() {
                *buffer = Vec::new();
            }
        }
        let waited_for = match &self.stage {
            Stage::Waiting(key) => key.capacity(),
            _ => 0,
        };
        let buffers = [&self.sealed, &self.request, &self.reply.frame].map(Vec::capacity);
        let kept = waited_for + buffers.iter().sum::<usize>();
        let counted = kept.saturating_sub(FREE);
        self.share.resize(counted).map_err(|_| Close::Ended)
    }

    /// From now on it waits for `key`, at most `time`.
    pub(super) fn wait_for(&mut self, key: String, time: Duration) -> Result<(), Close> {
        self.enter(Stage::Waiting(key));
        // A deadline that the clock cannot express is no deadline.
        self.deadline = self.since.checked_add(time);
        self.account()
    }

    /// Begins a reply.
    pub(super) fn reply(&mut self, status: u8, value: Option<Arc<Value>>) {
        let length = value.as_ref().map_or(0, |value| value.bytes.len());
        self.reply = Reply {
            head: wire::reply_head(status, length),
            value,
            ..Reply::default()
        };
        self.enter(Stage::Replying);
    }

    /// Sends what the client takes now. `Ok(true)`: it has taken all of its reply.
    pub(super) fn flush(&mut self) -> Result<bool, Close> {
        let channel = self.channel.as_mut().ok_or(Close::Ended)?;
        loop {
            if self.reply.sent == self.reply.frame.len() && !self.reply.seal(channel) {
                self.reply = Reply::default();
                self.enter(Stage::Ready);
                self.account()?;
                return Ok(true);
            }
            match self.stream.write(&self.reply.frame[self.reply.sent..]) {
                Ok(0) => return Err(Close::Ended),
                Ok(count) => self.reply.sent += count,
                Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                Err(cause) if cause.kind() == ErrorKind::WouldBlock => {
                    self.account()?;
                    return Ok(false);
                }
                Err(_) => return Err(Close::Ended),
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A forked child may have a copy of the socket, which would keep it open.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Reply {
    /// Seals the next frame; `false`: all has been sealed and sent.
    fn seal(&mut self, channel: &mut Channel) -> bool {
        let value: &[u8] = self.value.as_ref().map_or(&[], |value| &value.bytes);
        let total = REPLY_HEAD + value.len();
        if self.sealed == total {
            return false;
        }
        let mut content = [0; FRAME_CONTENT];
        let from_head = &self.head[self.sealed.min(REPLY_HEAD)..];
        content[..from_head.len()].copy_from_slice(from_head);
        let value = &value[self.sealed.saturating_sub(REPLY_HEAD)..];
        let part = value.len().min(FRAME_CONTENT - from_head.len());
        let filled = from_head.len() + part;
        content[from_head.len()..filled].copy_from_slice(&value[..part]);
        self.frame.clear();
        self.frame
            .reserve_exact(FRAME_HEAD + LONGEST_FRAME.min(filled + 16));
        channel.seal(&content[..filled], &mut self.frame);
        self.sealed += filled;
        self.sent = 0;
        true
    }
}
