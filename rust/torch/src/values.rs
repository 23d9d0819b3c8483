//! The values that C++ passes for an operation, as the core has them.

use std::time::Duration;

use unisono::buffer::Memory;
use unisono::error::{Code, Error, Result};
use unisono::types::{Collective, DataType, DeviceStream, ReduceOp};
use unisono::{Request, Sizes};

use crate::ffi;

/// # Safety
/// As for [`start`](crate::operation::start).
pub(crate) unsafe fn request(call: &ffi::Call<'_>) -> Result<Request> {
    let collective = Collective::from_number(call.collective.repr)
        .ok_or_else(|| Error::internal("an unknown collective"))?;
    let sizes = match call.layout {
        ffi::Layout::PerRank => Sizes::PerRank(call.counts.to_vec()),
        ffi::Layout::PerPair => Sizes::PerPair {
            send: call.counts.to_vec(),
            recv: call.recv_counts.to_vec(),
        },
        _ => Sizes::Even(call.count),
    };
    // SAFETY: the caller vouches for both.
    let (input, output) = unsafe {
        (
            call.has_input.then(|| memory(call.input)),
            call.has_output.then(|| memory(call.output)),
        )
    };
    Ok(Request {
        collective,
        dtype: data_type(call.dtype)?,
        op: operator(call.op, call.factor),
        root: call.root,
        input,
        output,
        sizes,
        timeout: timeout(call.timeout_ms),
        stream: stream(call.place),
        in_rank_order: false,
    })
}

/// # Safety
/// The pieces keep the promise of [`Memory::from_raw_parts`].
pub(crate) unsafe fn memory(pieces: &[ffi::Piece]) -> Memory {
    let mut parts = pieces
        .iter()
        .map(|piece| (piece.address as *mut u8, piece.bytes));
    // SAFETY: the caller's promise is the one asked for here.
    unsafe {
        match (parts.next(), pieces.len()) {
            (None, _) => Memory::empty(),
            (Some((start, bytes)), 1) => Memory::from_raw_parts(start, bytes),
            (Some(first), _) => Memory::from_pieces(std::iter::once(first).chain(parts)),
        }
    }
}

pub(crate) fn data_type(dtype: ffi::DataType) -> Result<DataType> {
    DataType::from_number(dtype.repr).ok_or_else(|| Error::internal("an unknown element type"))
}

fn operator(op: ffi::Operator, factor: f64) -> Option<ReduceOp> {
    if op == ffi::Operator::PremulSum {
        return Some(ReduceOp::PremulSum(factor));
    }
    ReduceOp::ALL
        .get(usize::from(op.repr).checked_sub(1)?)
        .copied()
}

/// The stream of a device's memory, none for the host's.
pub(crate) fn stream(place: ffi::Place) -> Option<DeviceStream> {
    let device = u32::try_from(place.device).ok()?;
    Some(DeviceStream {
        device,
        stream: place.stream,
    })
}

/// A limit in milliseconds, none when it is negative.
pub(crate) fn timeout(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}

/// The numbers that cross the bridge are the core's.
macro_rules! same_numbers {
    ($($bridged:ident::$name:ident == $number:expr;)+) => {
        const _: () = { $(assert!(ffi::$bridged::$name.repr == $number as u8);)+ };
    };
}

same_numbers! {
    DataType::Float16 == DataType::Float16;
    DataType::BFloat16 == DataType::BFloat16;
    DataType::Float32 == DataType::Float32;
    DataType::Float64 == DataType::Float64;
    DataType::Float8E4M3 == DataType::Float8E4M3;
    DataType::Float8E5M2 == DataType::Float8E5M2;
    DataType::Int8 == DataType::Int8;
    DataType::Int16 == DataType::Int16;
    DataType::Int32 == DataType::Int32;
    DataType::Int64 == DataType::Int64;
    DataType::UInt8 == DataType::UInt8;
    DataType::UInt16 == DataType::UInt16;
    DataType::UInt32 == DataType::UInt32;
    DataType::UInt64 == DataType::UInt64;
    DataType::Bool == DataType::Bool;
    DataType::Complex64 == DataType::Complex64;
    DataType::Complex128 == DataType::Complex128;
    Operator::Sum == ReduceOp::Sum.number();
    Operator::Avg == ReduceOp::Avg.number();
    Operator::Prod == ReduceOp::Prod.number();
    Operator::Min == ReduceOp::Min.number();
    Operator::Max == ReduceOp::Max.number();
    Operator::Band == ReduceOp::Band.number();
    Operator::Bor == ReduceOp::Bor.number();
    Operator::Bxor == ReduceOp::Bxor.number();
    Operator::PremulSum == ReduceOp::PremulSum(1.0).number();
    Collective::AllReduce == Collective::AllReduce;
    Collective::Reduce == Collective::Reduce;
    Collective::Broadcast == Collective::Broadcast;
    Collective::AllGather == Collective::AllGather;
    Collective::ReduceScatter == Collective::ReduceScatter;
    Collective::Gather == Collective::Gather;
    Collective::Scatter == Collective::Scatter;
    Collective::AllToAll == Collective::AllToAll;
    Collective::Barrier == Collective::Barrier;
    Collective::Send == Collective::Send;
    Collective::Recv == Collective::Recv;
    Code::InvalidArgument == Code::InvalidArgument;
    Code::Unsupported == Code::Unsupported;
    Code::Timeout == Code::Timeout;
    Code::PeerLost == Code::PeerLost;
    Code::Mismatch == Code::Mismatch;
    Code::Aborted == Code::Aborted;
    Code::System == Code::System;
    Code::Internal == Code::Internal;
}
