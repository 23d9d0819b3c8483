//! What a caller asks of CUDA before it asks a communicator for anything: on which device memory lies, of which device a
//! stream is, and that one stream goes on only after another. The doors that are given bare addresses and streams make
//! a [`DeviceStream`](crate::types::DeviceStream) of them with it.

pub use crate::transport::cuda::driver::{
    device_if_in_use, device_of, device_of_stream, look_again, may_be_in_use, order,
};
