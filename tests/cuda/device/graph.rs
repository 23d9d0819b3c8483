//! Graphs, as the driver makes them.

use std::ptr;

use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode, cuCtxSetCurrent,
    cuDevicePrimaryCtxRetain, cuGraphDestroy, cuGraphExecDestroy, cuGraphInstantiateWithFlags,
    cuGraphLaunch, cuStreamBeginCapture_v2, cuStreamEndCapture,
};
use unisono::transport::cuda::driver::Stream;

/// A graph that can be launched.
pub(crate) struct Graph {
    graph: CUgraph,
    executable: CUgraphExec,
}

fn raw(stream: &Stream) -> CUstream {
    ptr::with_exposed_provenance_mut(stream.handle().stream)
}

fn check(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// Captures the work that `body` enqueues on `stream`, instead of doing it.
pub(crate) fn capture(stream: &Stream, body: impl FnOnce()) -> Graph {
    let mut graph = ptr::null_mut();
    let mut executable = ptr::null_mut();
    let mut context = ptr::null_mut();
    // SAFETY: it stores a handle; the context stays for the life of the process, as unisono's own does.
    unsafe {
        check(cuDevicePrimaryCtxRetain(&mut context, 0));
        check(cuCtxSetCurrent(context));
    }
    // The other ranks of the process go on with what a global capture would forbid.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream lives, and the calls store handles.
    unsafe {
        check(cuStreamBeginCapture_v2(raw(stream), mode));
        body();
        check(cuStreamEndCapture(raw(stream), &mut graph));
        check(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    }
    Graph { graph, executable }
}

impl Graph {
    pub(crate) fn launch(&self, stream: &Stream) {
        // SAFETY: both live; what the graph uses, the tests keep.
        check(unsafe { cuGraphLaunch(self.executable, raw(stream)) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: they are not used again; the tests have waited for the stream.
        unsafe {
            check(cuGraphExecDestroy(self.executable));
            check(cuGraphDestroy(self.graph));
        }
    }
}
