//! Streams that are lent.

use std::sync::atomic::Ordering::Release;

use unisono::cuda::LentStream;
use unisono::error::Code;
use unisono::transport::cuda::driver::{Event, MemoryOperation, Pinned, Stream};

use crate::driver_calls::{capture, device};
use crate::harness;

harness::tests! {
    Emulated {
        a_stream_is_lent_to_one_at_a_time { DEVICES: "2" }
        a_stream_with_something_in_it_is_not_lent
        a_stream_that_is_captured_is_not_lent
    }
}

fn number(lent: &LentStream) -> usize {
    lent.handle().stream
}

fn as_stream(lent: &LentStream) -> Stream {
    Stream::of(lent.handle()).unwrap()
}

fn a_stream_is_lent_to_one_at_a_time() {
    let (a, b, other) = (
        LentStream::of(0).unwrap(),
        LentStream::of(0).unwrap(),
        LentStream::of(1).unwrap(),
    );
    assert_ne!(number(&a), number(&b));
    assert_eq!((a.handle().device, other.handle().device), (0, 1));
    as_stream(&a).synchronize().unwrap();
    let (first, others) = (number(&a), number(&other));
    drop((a, other));
    let again = LentStream::of(0).unwrap();
    assert_eq!(number(&again), first);
    assert_eq!(number(&LentStream::of(1).unwrap()), others);
    assert_eq!(LentStream::of(5).unwrap_err().code, Code::InvalidArgument);
}

fn a_stream_with_something_in_it_is_not_lent() {
    let words = Pinned::private(device(), 4096).unwrap();
    let busy = LentStream::of(0).unwrap();
    let handle = number(&busy);
    let stream = as_stream(&busy);
    let address = words.address();
    stream
        .operate(&[MemoryOperation::WaitAny { address, mask: 1 }])
        .unwrap();
    drop(busy);
    let another = LentStream::of(0).unwrap();
    assert_ne!(number(&another), handle);
    words.word(0).store(1, Release);
    stream.synchronize().unwrap();
    assert_eq!(number(&LentStream::of(0).unwrap()), handle);
}

fn a_stream_that_is_captured_is_not_lent() {
    let event = Event::new(device()).unwrap();
    let joined = LentStream::of(0).unwrap();
    let handle = number(&joined);
    let (origin, stream) = (Stream::create(device()).unwrap(), as_stream(&joined));
    let graph = capture(&origin, || {
        origin.record(&event).unwrap();
        stream.wait(&event).unwrap();
        drop(joined);
        // Another, and the capture is none the worse.
        assert_ne!(number(&LentStream::of(0).unwrap()), handle);
        stream.record(&event).unwrap();
        origin.wait(&event).unwrap();
    });
    graph.launch(&origin);
    origin.synchronize().unwrap();
}
