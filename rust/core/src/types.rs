//! The field's vocabulary as types: ranks, element types, reduction operators, collectives.

pub use unisono_plan::{Algorithm, Collective, Rank};
pub use unisono_reduce::{DataType, Meaningless, ReduceOp};

/// The order in which an operation on device memory happens: a stream of a CUDA device.
///
/// The operation comes after the work that is in the stream already, and what is put into the stream later comes after
/// the operation. All buffers of the operation lie on that device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceStream {
    /// The device's number in this process, as CUDA counts them (after `CUDA_VISIBLE_DEVICES`).
    pub device: u32,
    /// A `CUstream` (which is what a `cudaStream_t` is), as a number. 0 is the legacy default stream.
    pub stream: usize,
}
