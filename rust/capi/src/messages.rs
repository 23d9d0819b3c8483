//! Send and receive.

use std::ffi::c_void;

use unisono::Received;
use unisono::error::{Code, Error, Result};
use unisono::types::Rank;

use crate::error::{Status, output};
use crate::group;
use crate::joined::{Communicator, Joined, on};
use crate::run::{Message, Peer, tag};
use crate::types::{self, Checked, DType, Options, rank};
use crate::work::{self, Work};

/// The source that stands for any.
pub const ANY_SOURCE: i32 = -1;

/// Where elements begin, how many there are, and of what type.
#[derive(Clone, Copy)]
struct Elements(*const c_void, usize, DType);

/// The message to rank `to`, checked.
#[inline]
fn outgoing(
    joined: &Joined,
    options: &Checked,
    elements: Elements,
    (to, number): (i32, u64),
) -> Result<Message> {
    let Elements(start, count, dtype) = elements;
    let dtype = dtype.check()?;
    Ok(Message {
        dtype,
        buffer: options.buffer("send: buffer", start, count, dtype)?,
        peer: Peer::To(rank("send: to", to, joined.comm.world_size())?),
        tag: tag(number)?,
    })
}

/// The message from rank `from`, or from any, checked.
#[inline]
fn incoming(
    joined: &Joined,
    options: &Checked,
    elements: Elements,
    (from, number): (i32, u64),
) -> Result<Message> {
    let Elements(start, count, dtype) = elements;
    let dtype = dtype.check()?;
    let from = source_of("recv: from", from, joined)?;
    Ok(Message {
        dtype,
        buffer: options.buffer("recv: buffer", start, count, dtype)?,
        peer: Peer::From(from),
        tag: tag(number)?,
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_send(
    comm: *mut Communicator,
    buffer: *const c_void,
    count: usize,
    dtype: DType,
    to: i32,
    tag: u64,
    options: *const Options,
) -> Status {
    on(comm, |joined| {
        // SAFETY: here and in all functions of this file, addresses are what the header asks for.
        let options = unsafe { Checked::new(options)? };
        let message = outgoing(joined, &options, Elements(buffer, count, dtype), (to, tag))?;
        if group::is_open() {
            return message.add_to_group(comm, joined, &options);
        }
        message.run(joined, &options, false).map(drop)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_recv(
    comm: *mut Communicator,
    buffer: *mut c_void,
    count: usize,
    dtype: DType,
    from: i32,
    tag: u64,
    options: *const Options,
    source: *mut i32,
) -> Status {
    on(comm, |joined| {
        // SAFETY: as in `unisono_send`.
        let options = unsafe { Checked::new(options)? };
        let message = incoming(
            joined,
            &options,
            Elements(buffer, count, dtype),
            (from, tag),
        )?;
        if group::is_open() {
            refuse_answers("recv", source, &options)?;
            return message.add_to_group(comm, joined, &options);
        }
        let received = message.run(joined, &options, !source.is_null())?;
        tell(received, source, &options)
    })
}

/// In a group of calls the message is not there yet when the call returns.
fn refuse_answers(call: &str, source: *mut i32, options: &Checked) -> Result<()> {
    if source.is_null() && options.received.is_null() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{call}: in a group the message has not come yet when this returns: give NULL for source and in the options for \
         received, or use unisono_irecv"
    )))
}

fn tell(received: Option<Received>, source: *mut i32, options: &Checked) -> Result<()> {
    let Some(received) = received else {
        return Ok(());
    };
    if !source.is_null() {
        output("source", source)?.write(received.source as i32);
    }
    if !options.received.is_null() {
        output("received", options.received)?.write(types::elements(received));
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_probe(
    comm: *mut Communicator,
    from: i32,
    tag: u64,
    seconds: f64,
    source: *mut i32,
    elements: *mut usize,
    dtype: *mut DType,
) -> Status {
    on(comm, |joined| {
        let from = source_of("probe: from", from, joined)?;
        let patience = types::seconds("the time to probe", seconds)?;
        let found = joined.comm.probe(from, self::tag(tag)?, patience)?;
        let found = found.ok_or_else(|| none_came(seconds))?;
        if !source.is_null() {
            output("source", source)?.write(found.source as i32);
        }
        if !elements.is_null() {
            output("count", elements)?.write(types::elements(found));
        }
        if !dtype.is_null() {
            output("dtype", dtype)?.write(DType(found.dtype as u32));
        }
        Ok(())
    })
}

fn none_came(seconds: f64) -> Error {
    let message = format!("probe: no message with this tag has come within {seconds} s");
    Error::new(Code::Timeout, message)
}

fn source_of(name: &'static str, from: i32, joined: &Joined) -> Result<Option<Rank>> {
    match from {
        ANY_SOURCE => Ok(None),
        from => rank(name, from, joined.comm.world_size()).map(Some),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_sendrecv(
    comm: *mut Communicator,
    send_buffer: *const c_void,
    send_count: usize,
    to: i32,
    receive_buffer: *mut c_void,
    receive_count: usize,
    from: i32,
    dtype: DType,
    tag: u64,
    options: *const Options,
    source: *mut i32,
) -> Status {
    on(comm, |joined| {
        // SAFETY: as in `unisono_send`.
        let options = unsafe { Checked::new(options)? };
        let sent = Elements(send_buffer, send_count, dtype);
        let sent = outgoing(joined, &options, sent, (to, tag))?;
        let received = Elements(receive_buffer, receive_count, dtype);
        let received = incoming(joined, &options, received, (from, tag))?;
        if group::is_open() {
            refuse_answers("sendrecv", source, &options)?;
            sent.add_to_group(comm, joined, &options)?;
            return received.add_to_group(comm, joined, &options);
        }
        let received = sent.exchange(received, joined, &options, !source.is_null())?;
        tell(received, source, &options)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_isend(
    comm: *mut Communicator,
    buffer: *const c_void,
    count: usize,
    dtype: DType,
    to: i32,
    tag: u64,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        let place = output("work", work)?;
        // SAFETY: as in `unisono_send`.
        let options = unsafe { Checked::new(options)? };
        let message = outgoing(joined, &options, Elements(buffer, count, dtype), (to, tag))?;
        place.write(work::handle(message.start(joined, &options)?)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_irecv(
    comm: *mut Communicator,
    buffer: *mut c_void,
    count: usize,
    dtype: DType,
    from: i32,
    tag: u64,
    options: *const Options,
    work: *mut *mut Work,
) -> Status {
    on(comm, |joined| {
        let place = output("work", work)?;
        // SAFETY: as in `unisono_send`.
        let options = unsafe { Checked::new(options)? };
        let message = incoming(
            joined,
            &options,
            Elements(buffer, count, dtype),
            (from, tag),
        )?;
        place.write(work::handle(message.start(joined, &options)?)?);
        Ok(())
    })
}
