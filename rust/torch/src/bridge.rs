//! The interface between Rust and C++. `build.rs` makes the C++ side of it from this file.

use crate::group::{
    Group, apart, estimate, estimate_message, join, mask, reconfigure, reconfigure_handle, shrink,
    subgroup,
};
use crate::heap::{heap_allocate, heap_enabled, heap_free};
use crate::interrupts::{check_signals, give_up, take_raised};
use crate::operation::{Operation, receive, run, send, start};
use crate::streams::{OwnStream, check_device, is_capturing, lend_stream};
use crate::symmetric::{Symmetric, rendezvous};
use crate::window::{Transfer, View, Window, expose, put, view};

#[cxx::bridge(namespace = "unisono")]
pub(crate) mod ffi {
    /// How something ended: 0, or the number of an error code and its text.
    struct Status {
        code: u8,
        message: String,
    }

    /// The answer of a store.
    struct Fetched {
        status: Status,
        found: bool,
        value: Vec<u8>,
    }

    /// Where a store is served, an empty host: nowhere that is known; in which file it is, if in one; and whether its end
    /// may be that of rank 0.
    struct StorePlace {
        host: String,
        port: u16,
        file: String,
        ends_with_rank_0: bool,
    }

    /// A setting by name.
    struct Setting {
        name: String,
        value: String,
    }

    /// One contiguous piece of a buffer.
    #[derive(Clone, Copy)]
    struct Piece {
        address: usize,
        bytes: usize,
    }

    /// `unisono::types::DataType` by number.
    #[repr(u8)]
    enum DataType {
        Float16 = 1,
        BFloat16 = 2,
        Float32 = 3,
        Float64 = 4,
        Float8E4M3 = 5,
        Float8E5M2 = 6,
        Int8 = 7,
        Int16 = 8,
        Int32 = 9,
        Int64 = 10,
        UInt8 = 11,
        UInt16 = 12,
        UInt32 = 13,
        UInt64 = 14,
        Bool = 15,
        Complex64 = 16,
        Complex128 = 17,
    }

    /// `unisono::types::ReduceOp` by number, and 0 for operations without one.
    #[repr(u8)]
    enum Operator {
        None = 0,
        Sum = 1,
        Avg = 2,
        Prod = 3,
        Min = 4,
        Max = 5,
        Band = 6,
        Bor = 7,
        Bxor = 8,
        PremulSum = 12,
    }

    /// `unisono::types::Collective` by number.
    #[repr(u8)]
    enum Collective {
        AllReduce = 1,
        Reduce = 2,
        Broadcast = 3,
        AllGather = 4,
        ReduceScatter = 5,
        Gather = 6,
        Scatter = 7,
        AllToAll = 8,
        Barrier = 9,
        Send = 10,
        Recv = 11,
    }

    /// The kinds of error that C++ distinguishes, by the number of `unisono::error::Code`.
    #[repr(u8)]
    enum Code {
        Success = 0,
        InvalidArgument = 1,
        Unsupported = 2,
        Timeout = 3,
        PeerLost = 4,
        Mismatch = 5,
        Aborted = 6,
        System = 7,
        Internal = 9,
        /// None of the core's: a handler of a signal has raised, and [`take_raised`] gives what.
        Interrupted = 255,
    }

    /// A Python exception: its class, itself and its traceback (or 0), each a reference that the owner of this gives up.
    struct Raised {
        class_: usize,
        value: usize,
        traceback: usize,
        message: String,
    }

    /// How the blocks of an operation are sized.
    enum Layout {
        Even,
        PerRank,
        PerPair,
    }

    /// Where memory lies, and the order in which an operation on it happens: `device` below 0 for the host's, else a
    /// device's number and one of its streams.
    #[derive(Clone, Copy)]
    struct Place {
        device: i32,
        stream: usize,
    }

    /// A collective with its buffers.
    struct Call<'a> {
        collective: Collective,
        dtype: DataType,
        op: Operator,
        factor: f64,
        root: usize,
        input: &'a [Piece],
        has_input: bool,
        output: &'a [Piece],
        has_output: bool,
        layout: Layout,
        count: usize,
        counts: &'a [usize],
        recv_counts: &'a [usize],
        timeout_ms: i64,
        place: Place,
    }

    /// A send, or a receive (`peer` below 0: from any rank).
    struct Message<'a> {
        dtype: DataType,
        pieces: &'a [Piece],
        peer: i64,
        tag: u64,
        timeout_ms: i64,
        place: Place,
    }

    /// How an operation that was carried out at once ended, and its number in the group.
    struct Ran {
        status: Status,
        sequence: u64,
    }

    /// One number of a group's account of itself.
    struct Usage {
        name: String,
        amount: u64,
    }

    /// A text.
    struct Handed {
        status: Status,
        text: String,
    }

    /// The place of this process in a group that has been reconfigured.
    struct Formed {
        status: Status,
        rank: usize,
        size: usize,
    }

    /// The ranks that take part in a group from now on.
    struct Left {
        status: Status,
        living: Vec<usize>,
    }

    struct Joined {
        status: Status,
        group: Box<Group>,
    }

    struct Started {
        status: Status,
        operation: Box<Operation>,
    }

    struct Lent {
        status: Status,
        stream: Box<OwnStream>,
    }

    /// A window of all ranks.
    struct Exposed {
        status: Status,
        window: Box<Window>,
    }

    /// Memory of one size of all ranks.
    struct Met {
        status: Status,
        symmetric: Box<Symmetric>,
    }

    /// A put that has begun.
    struct Begun {
        status: Status,
        transfer: Box<Transfer>,
    }

    /// Where the memory of another rank begins here, and its device; below 0 for the host.
    struct Viewed {
        status: Status,
        address: usize,
        device: i64,
        view: Box<View>,
    }

    /// Whether a signal had come.
    struct Tried {
        status: Status,
        has_come: bool,
    }

    extern "Rust" {
        type Group;
        type Transfer;
        type View;
        type Window;
        type Operation;
        type OwnStream;
        type Symmetric;

        fn join(
            store: &Store,
            rank: usize,
            world: usize,
            numbers: &[u64],
            settings: &[Setting],
        ) -> Joined;
        unsafe fn start(group: &Group, call: &Call, completion: UniquePtr<Completion>) -> Started;
        fn subgroup(group: &Group, ranks: &[usize], label: &str) -> Joined;
        fn shrink(group: &Group, excluded: &[usize]) -> Joined;
        fn mask(group: &Group, excluded: &[usize]) -> Left;
        fn apart(settings: &[Setting]) -> Joined;
        fn reconfigure_handle(group: &Group) -> Handed;
        fn reconfigure(
            group: &Group,
            handles: Vec<String>,
            is_ordered: bool,
            number: i64,
        ) -> Formed;
        unsafe fn run(group: &Group, call: &Call) -> Ran;
        unsafe fn estimate(group: &Group, call: &Call) -> f64;
        fn estimate_message(group: &Group, peer: i64, bytes: usize) -> f64;
        unsafe fn send(
            group: &Group,
            message: &Message,
            completion: UniquePtr<Completion>,
        ) -> Started;
        unsafe fn receive(
            group: &Group,
            message: &Message,
            completion: UniquePtr<Completion>,
        ) -> Started;
        fn monitored_barrier(self: &Group, timeout_ms: u64, report_all: bool) -> Status;
        fn all_reduce_int8(self: &Group, values: &mut [f32], average: bool) -> Status;
        fn set_timeout(self: &Group, timeout_ms: u64);
        fn sequence(self: &Group) -> u64;
        fn error(self: &Group) -> Status;
        fn ends_on_device_failure(self: &Group) -> bool;
        fn reads_devices_in_place(self: &Group) -> bool;
        fn memory(self: &Group) -> Vec<Usage>;
        fn stats(self: &Group) -> String;
        fn abort(self: &Group, reason: &str);
        fn close(self: &Group);

        unsafe fn expose(
            group: &Group,
            memory: Piece,
            note: &[u8],
            owner: UniquePtr<Keeper>,
        ) -> Exposed;
        unsafe fn put(
            window: &Window,
            to: usize,
            offset: usize,
            source: Piece,
            owner: UniquePtr<Keeper>,
        ) -> Begun;
        fn view(window: &Window, rank: usize) -> Viewed;
        fn has_devices(self: &Window) -> bool;
        fn bytes(self: &Window, rank: usize) -> usize;
        fn note(self: &Window, rank: usize) -> Vec<u8>;
        fn signal(self: &Window, to: usize) -> Status;
        fn wait_signal(self: &Window, from: usize, timeout_ms: i64) -> Status;
        fn try_wait_signal(self: &Window, from: usize) -> Tried;
        fn fence(self: &Window) -> Status;
        fn close(self: &Window);
        fn is_done(self: &Transfer) -> bool;
        fn wait(self: &Transfer, timeout_ms: i64) -> Status;

        unsafe fn rendezvous(
            group: &Group,
            memory: Piece,
            pad: usize,
            owner: UniquePtr<Keeper>,
        ) -> Met;
        fn start(self: &Symmetric, rank: usize) -> usize;
        fn pad(self: &Symmetric, rank: usize) -> usize;
        fn put_signal(self: &Symmetric, to: usize, channel: usize, timeout_ms: i64) -> Status;
        fn wait_signal(self: &Symmetric, from: usize, channel: usize, timeout_ms: i64) -> Status;
        fn barrier(self: &Symmetric, channel: usize, timeout_ms: i64) -> Status;

        fn check_signals() -> Status;
        fn take_raised() -> Raised;
        unsafe fn give_up(object: usize);

        fn check_device(device: i32) -> Status;
        fn is_capturing(place: Place) -> bool;
        fn lend_stream(device: i32) -> Lent;
        fn handle(self: &OwnStream) -> usize;

        fn heap_enabled() -> bool;
        fn heap_allocate(bytes: usize) -> *mut u8;
        unsafe fn heap_free(address: *mut u8) -> bool;

        fn is_done(self: &Operation) -> bool;
        fn wait(self: &Operation, timeout_ms: i64) -> Status;
        fn source(self: &Operation) -> i64;
        fn sequence(self: &Operation) -> u64;
        fn milliseconds(self: &Operation) -> f64;
    }

    unsafe extern "C++" {
        include!("bridge.hpp");

        type Keeper;

        type Completion;
        fn finish(self: Pin<&mut Completion>, status: &Status);

        type Store;
        fn set(self: &Store, key: &str, value: &[u8]) -> Status;
        fn wait(self: &Store, key: &str, timeout_ms: u64) -> Fetched;
        fn fetch(self: &Store, key: &str) -> Fetched;
        fn place(self: &Store) -> StorePlace;

        fn torch_version() -> String;
        fn close_all();
    }
}
