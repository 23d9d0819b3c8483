//! Streams, events, memory operations, captures.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use crate::abi::{
    BatchMemOp, CAPTURE_ACTIVE, Device, DevicePointer, Handle, In, MEMORY_OP_WAIT_32,
    MEMORY_OP_WAIT_64, MEMORY_OP_WRITE_32, MEMORY_OP_WRITE_64, Out, STREAM_NON_BLOCKING,
};
use crate::call::driver_functions;
use crate::capture::{self, Mode};
use crate::memory_operations::MemoryOperation;
use crate::operation::Operation;
use crate::status::{Outcome, Status};
use crate::stream::{self, Kind, Stream};
use crate::{context, event};

driver_functions! {
    /// Makes a stream.
    fn cuStreamCreate(handle: Out<Handle>, flags: c_uint) {
        create(&handle, flags, 0)
    }

    /// Makes a stream with a priority.
    fn cuStreamCreateWithPriority(handle: Out<Handle>, flags: c_uint, priority: c_int) {
        create(&handle, flags, priority.clamp(-5, 0))
    }

    /// Destroys a stream; what is in it is still done.
    fn cuStreamDestroy_v2(handle: Handle) {
        context::current()?;
        stream::destroy(handle)
    }

    /// Waits until everything in the stream is done.
    fn cuStreamSynchronize(handle: Handle) {
        stream::get(handle)?.synchronize()
    }

    /// Whether everything in the stream is done.
    fn cuStreamQuery(handle: Handle) {
        stream::get(handle)?.query()
    }

    /// The context of a stream. Asking one that is being captured spoils its capture; the manual does not say so, the
    /// driver does it.
    fn cuStreamGetCtx(handle: Handle, context: Out<Handle>) {
        context.set(asked(handle)?.context.handle)
    }

    /// The device of a stream; as `cuStreamGetCtx` during a capture.
    fn cuStreamGetDevice(handle: Handle, device: Out<Device>) {
        device.set(asked(handle)?.context.device as Device)
    }

    /// The flags a stream was made with.
    fn cuStreamGetFlags(handle: Handle, flags: Out<c_uint>) {
        flags.set((stream::get(handle)?.kind == Kind::NonBlocking).into())
    }

    /// The priority of a stream.
    fn cuStreamGetPriority(handle: Handle, priority: Out<c_int>) {
        priority.set(stream::get(handle)?.priority)
    }

    /// A number no other stream of the process has; as `cuStreamGetCtx` during a capture.
    fn cuStreamGetId(handle: Handle, id: Out<u64>) {
        id.set(asked(handle)?.id)
    }

    /// Makes the stream wait for an event. Of the flags only the default is emulated.
    fn cuStreamWaitEvent(handle: Handle, event: Handle, flags: c_uint) {
        if flags != 0 {
            return Err(if flags == 1 { Status::NOT_SUPPORTED } else { Status::INVALID_VALUE });
        }
        event::get(event)?.awaited_by(&stream::get(handle)?)
    }

    /// Makes an event.
    fn cuEventCreate(handle: Out<Handle>, flags: c_uint) {
        if handle.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        handle.set(event::create(flags)?)
    }

    /// Destroys an event.
    fn cuEventDestroy_v2(handle: Handle) {
        event::destroy(handle)
    }

    /// Records an event in a stream.
    fn cuEventRecord(handle: Handle, stream: Handle) {
        event::get(handle)?.record(&stream::get(stream)?)
    }

    /// The same, with flags; only the default is emulated.
    fn cuEventRecordWithFlags(handle: Handle, stream: Handle, flags: c_uint) {
        if flags != 0 {
            return Err(if flags == 1 { Status::NOT_SUPPORTED } else { Status::INVALID_VALUE });
        }
        event::get(handle)?.record(&stream::get(stream)?)
    }

    /// Whether the stream has got past an event.
    fn cuEventQuery(handle: Handle) {
        event::get(handle)?.query()
    }

    /// Waits until it has.
    fn cuEventSynchronize(handle: Handle) {
        event::get(handle)?.synchronize()
    }

    /// Milliseconds between two events.
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: Handle, end: Handle) {
        milliseconds.set(event::get(start)?.elapsed(&*event::get(end)?)?)
    }

    /// Makes the stream wait for a word of 4 bytes.
    fn cuStreamWaitValue32_v2(stream: Handle, address: DevicePointer, value: u32, flags: c_uint) {
        memory_operation(stream, MEMORY_OP_WAIT_32, address, value.into(), flags)
    }

    /// Makes the stream wait for a word of 8 bytes.
    fn cuStreamWaitValue64_v2(stream: Handle, address: DevicePointer, value: u64, flags: c_uint) {
        memory_operation(stream, MEMORY_OP_WAIT_64, address, value, flags)
    }

    /// Makes the stream write a word of 4 bytes.
    fn cuStreamWriteValue32_v2(stream: Handle, address: DevicePointer, value: u32, flags: c_uint) {
        memory_operation(stream, MEMORY_OP_WRITE_32, address, value.into(), flags)
    }

    /// Makes the stream write a word of 8 bytes.
    fn cuStreamWriteValue64_v2(stream: Handle, address: DevicePointer, value: u64, flags: c_uint) {
        memory_operation(stream, MEMORY_OP_WRITE_64, address, value, flags)
    }

    /// Makes the stream do several of these, in their order.
    fn cuStreamBatchMemOp_v2(stream: Handle, count: c_uint, operations: In<BatchMemOp>, flags: c_uint) {
        let stream = stream::get(stream)?;
        if flags != 0 || !(1..256).contains(&count) {
            return Err(Status::INVALID_VALUE);
        }
        let operations = (0..count as usize)
            .map(|index| MemoryOperation::new(&operations.at(index)?))
            .collect::<Outcome<_>>()?;
        stream.enqueue(Operation::Memory(operations)).map(|_| ())
    }

    /// Begins to capture what is put into the stream.
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_uint) {
        capture::begin(&stream::get(stream)?, Mode::from_number(mode)?)
    }

    /// Ends it, with a graph.
    fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) {
        graph.set(0)?;
        graph.set(capture::end(&stream::get(stream)?)?)
    }

    /// Whether the stream is captured.
    fn cuStreamIsCapturing(stream: Handle, status: Out<c_uint>) {
        status.set(capture::status(&*stream::get(stream)?)?.0)
    }

    /// Whether the stream is captured, and in which capture. Its graph is not shown before it is done.
    fn cuStreamGetCaptureInfo_v2(
        stream: Handle, status: Out<c_uint>, id: Out<u64>, graph: Out<Handle>, nodes: Out<usize>, count: Out<usize>,
    ) {
        let (now, capture) = capture::status(&*stream::get(stream)?)?;
        status.set(now)?;
        if now == CAPTURE_ACTIVE {
            id.set_if_wanted(capture);
            graph.set_if_wanted(0);
            nodes.set_if_wanted(0);
            count.set_if_wanted(0);
        }
        Ok(())
    }

    /// Sets how this thread takes captures, and says how it took them before.
    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) {
        if mode.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: by the driver API's contract the caller's old mode is where the new one is wanted.
        let wanted = Mode::from_number(unsafe { mode.pointer().read() })?;
        mode.set(capture::exchange_mode(wanted) as c_uint)
    }
}

/// A stream that is asked what it is, which it may not be while it is captured.
fn asked(handle: Handle) -> Outcome<Arc<Stream>> {
    let stream = stream::get(handle)?;
    capture::refuse_captured(&stream)?;
    Ok(stream)
}

fn create(handle: &Out<Handle>, flags: u32, priority: i32) -> Outcome {
    let kind = match flags {
        0 => Kind::Blocking,
        STREAM_NON_BLOCKING => Kind::NonBlocking,
        _ => return Err(Status::INVALID_VALUE),
    };
    if handle.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    handle.set(stream::create(&context::current()?, kind, priority).handle)
}

fn memory_operation(
    stream: Handle,
    operation: u32,
    address: u64,
    value: u64,
    flags: u32,
) -> Outcome {
    let stream = stream::get(stream)?;
    let operation = MemoryOperation::new(&BatchMemOp {
        operation,
        barrier_flags: 0,
        address,
        value,
        flags,
        alias: 0,
        pad: 0,
    })?;
    stream
        .enqueue(Operation::Memory(vec![operation]))
        .map(|_| ())
}
