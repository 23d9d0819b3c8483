//! Modules, kernels, host functions, graphs.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::abi::{Handle, HostFunction, In, Out};
use crate::call::driver_functions;
use crate::operation::{HostCall, Operation};
use crate::status::{Outcome, Status};
use crate::{graph, module, stream};

driver_functions! {
    /// Loads a module.
    fn cuModuleLoadData(handle: Out<Handle>, image: In<c_char>) {
        handle.set(load(&image)?)
    }

    /// Loads a module; the options are not looked at.
    fn cuModuleLoadDataEx(
        handle: Out<Handle>, image: In<c_char>, _count: c_uint, _options: *mut c_uint, _values: *mut *mut c_void,
    ) {
        handle.set(load(&image)?)
    }

    /// Unloads a module.
    fn cuModuleUnload(handle: Handle) {
        module::unload(handle)
    }

    /// Finds an entry point of a module.
    fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: In<c_char>) {
        if name.pointer().is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: by the driver API's contract the name is a C string.
        let name = unsafe { CStr::from_ptr(name.pointer()) };
        let name = name.to_str().map_err(|_| Status::NOT_FOUND)?;
        function.set(module::function(module, name)?)
    }

    /// An attribute of an entry point.
    fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_uint, function: Handle) {
        value.set(module::function_attribute(function, attribute)?)
    }

    /// Loads an entry point, if that has not been done.
    fn cuFuncLoad(function: Handle) {
        module::function_attribute(function, 0).map(|_| ())
    }

    /// Blocks of a size that fit a multiprocessor at once.
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<c_int>, function: Handle, size: c_int, _shared: usize,
    ) {
        module::function_attribute(function, 0)?;
        if size < 1 {
            return Err(Status::INVALID_VALUE);
        }
        blocks.set((2048 / size).min(32))
    }

    /// Launches a kernel.
    fn cuLaunchKernel(
        function: Handle,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint,
        stream: Handle,
        parameters: In<*const u8>,
        extra: In<usize>,
    ) {
        let shape = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared);
        module::launch(function, shape, &stream::get(stream)?, &parameters, &extra)
    }

    /// Calls a function of the caller's in stream order.
    fn cuLaunchHostFunc(stream: Handle, function: Option<HostFunction>, argument: usize) {
        let function = function.ok_or(Status::INVALID_VALUE)?;
        let call = HostCall { function, argument };
        stream::get(stream)?.enqueue(Operation::Host(call)).map(|_| ())
    }

    /// Makes a graph executable.
    fn cuGraphInstantiateWithFlags(executable: Out<Handle>, graph: Handle, flags: u64) {
        if flags > 15 || executable.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        executable.set(graph::instantiate(graph)?)
    }

    /// Runs a graph in stream order.
    fn cuGraphLaunch(executable: Handle, stream: Handle) {
        let graph = graph::executable(executable)?;
        stream::get(stream)?.enqueue(Operation::Graph(graph)).map(|_| ())
    }

    /// How many nodes a graph has; the nodes themselves are not shown.
    fn cuGraphGetNodes(graph: Handle, nodes: Out<usize>, count: Out<usize>) {
        if !nodes.is_null() {
            return Err(Status::NOT_SUPPORTED);
        }
        count.set(graph::nodes(graph)?)
    }

    /// Destroys a graph.
    fn cuGraphDestroy(graph: Handle) {
        graph::destroy(graph)
    }

    /// Destroys an executable graph.
    fn cuGraphExecDestroy(executable: Handle) {
        graph::destroy_executable(executable)
    }
}

fn load(image: &In<c_char>) -> Outcome<Handle> {
    if image.pointer().is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: by the driver API's contract the image is PTX, which ends with a zero byte, or a binary, which begins with a
    // header that has one within its first bytes.
    let text = unsafe { CStr::from_ptr(image.pointer()) };
    module::load(text.to_str().map_err(|_| Status::INVALID_IMAGE)?)
}
