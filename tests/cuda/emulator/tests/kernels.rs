//! Modules and launches: the kernels themselves are tested where they are, here it is how they are run.

mod common;

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use common::alone;
use common::gpu::*;

fn ptx(dtype: &str) -> CString {
    CString::new(unisono_cuda_kernels::ptx(dtype)).unwrap()
}

fn load(text: &CString) -> sys::CUmodule {
    let mut module = null_mut();
    ok!(cuModuleLoadData(&mut module, text.as_ptr().cast()));
    module
}

#[test]
fn every_kernel_is_found_in_its_module() {
    alone("every_kernel_is_found_in_its_module", &[], || {
        start(0);
        let mut modules = HashMap::new();
        for kernel in unisono_cuda_kernels::kernels() {
            let dtype = kernel.dtype();
            let module = *modules.entry(dtype).or_insert_with(|| load(&ptx(dtype)));
            let found = function(module, kernel.name());
            assert_eq!(found, function(module, kernel.name()));
        }
        assert_eq!(modules.len(), 17);
        let name = c"unisono_reduce_typo";
        let mut none = null_mut();
        fails!(
            CUDA_ERROR_NOT_FOUND,
            cuModuleGetFunction(&mut none, modules["float32"], name.as_ptr())
        );
    });
}

#[test]
fn a_launch_keeps_its_parameters_and_its_place_in_the_stream() {
    alone(
        "a_launch_keeps_its_parameters_and_its_place_in_the_stream",
        &[],
        || {
            start(0);
            let sum = function(load(&ptx("float32")), "unisono_reduce_sum");
            let floats = |values: &[f32]| {
                upload(
                    &values
                        .iter()
                        .map(|value| value.to_bits())
                        .collect::<Vec<_>>(),
                )
            };
            let a: Vec<f32> = (0..1000).map(|i| i as f32).collect();
            let (a, b, out) = (floats(&a), floats(&vec![0.5; 1000]), allocate(4000));
            let (stream, words) = (stream(), pinned(1));
            hold(stream, &words[0]);
            ok!(cuMemsetD32Async(b, 2.0_f32.to_bits(), 1000, stream));
            // The parameters live in `launch_sum` alone, which returns before the kernel runs.
            assert_eq!(
                launch_sum(sum, stream, out, &[a, b], 1000),
                CUresult::CUDA_SUCCESS
            );
            ok!(cuMemsetD32Async(b, 0, 1000, stream));
            release(&words[0]);
            ok!(cuStreamSynchronize(stream));
            let results = download(out, 1000);
            for (index, result) in results.into_iter().enumerate() {
                assert_eq!(f32::from_bits(result), index as f32 + 2.0);
            }
        },
    );
}

#[test]
fn kernels_run_in_the_shape_asked_for_or_in_a_small_one() {
    for grid in ["small", "full"] {
        let name = "kernels_run_in_the_shape_asked_for_or_in_a_small_one";
        alone(name, &[("GRID", grid)], || {
            start(0);
            let sum = function(load(&ptx("int32")), "unisono_reduce_sum");
            let values: Vec<u32> = (0..5001).collect();
            let (a, out) = (upload(&values), allocate(5001 * 4));
            assert_eq!(
                launch_sum(sum, LEGACY, out, &[a, a, a], 5001),
                CUresult::CUDA_SUCCESS
            );
            let expected: Vec<u32> = values.iter().map(|value| 3 * value).collect();
            assert_eq!(download(out, 5001), expected);
        });
    }
}

#[test]
fn parameters_may_come_in_one_buffer() {
    alone("parameters_may_come_in_one_buffer", &[], || {
        start(0);
        let scale = function(load(&ptx("float32")), "unisono_scale");
        let memory = upload(&[1.5_f32.to_bits(); 4]);
        let mut buffer = [memory, memory, 4, 2.0_f64.to_bits()];
        let bytes = Cell::new(size_of_val(&buffer));
        let word = |number| std::ptr::without_provenance_mut::<c_void>(number);
        let mut extra = [
            word(1),
            buffer.as_mut_ptr().cast(),
            word(2),
            bytes.as_ptr().cast(),
            null_mut(),
        ];
        ok!(cuLaunchKernel(
            scale,
            1,
            1,
            1,
            32,
            1,
            1,
            0,
            LEGACY,
            null_mut(),
            extra.as_mut_ptr()
        ));
        assert_eq!(download(memory, 4), [3.0_f32.to_bits(); 4]);
        bytes.set(8);
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuLaunchKernel(
                scale,
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                LEGACY,
                null_mut(),
                extra.as_mut_ptr()
            )
        );
    });
}

#[test]
fn shapes_no_device_takes_are_refused() {
    alone("shapes_no_device_takes_are_refused", &[], || {
        start(0);
        let scale = function(load(&ptx("float32")), "unisono_scale");
        let mut none = [null_mut(); 4];
        let mut refused = |grid: [u32; 3], block: [u32; 3]| {
            let [x, y, z] = grid;
            let [a, b, c] = block;
            fails!(
                CUDA_ERROR_INVALID_VALUE,
                cuLaunchKernel(
                    scale,
                    x,
                    y,
                    z,
                    a,
                    b,
                    c,
                    0,
                    LEGACY,
                    none.as_mut_ptr(),
                    null_mut()
                )
            );
        };
        refused([0, 1, 1], [32, 1, 1]);
        refused([1, 1, 1], [0, 1, 1]);
        refused([1, 1 << 16, 1], [32, 1, 1]);
        refused([1, 1, 1], [2048, 1, 1]);
        // More than the kernel was compiled for.
        refused([1, 1, 1], [1024, 1, 1]);
    });
}

#[test]
fn an_access_outside_breaks_the_context_for_good() {
    alone("an_access_outside_breaks_the_context_for_good", &[], || {
        start(0);
        let sum = function(load(&ptx("int32")), "unisono_reduce_sum");
        let (a, out, words) = (upload(&[1, 2, 3]), allocate(16), pinned(3));
        let stream = stream();
        let (waiting, later) = (common::gpu::stream(), allocate(64));
        hold(waiting, &words[0]);
        hold(stream, &words[1]);
        // One element too many.
        assert_eq!(
            launch_sum(sum, stream, out, &[a], 4),
            CUresult::CUDA_SUCCESS
        );
        ok!(cuStreamWriteValue32_v2(stream, seen(&words[2]), 1, 0));
        release(&words[1]);
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
        // Later operations were not done, everything else fails as well, and no stream waits for ever.
        assert_eq!(words[2].load(Ordering::SeqCst), 0);
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(waiting));
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemFree_v2(later));
        let mut none = 0;
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAlloc_v2(&mut none, 4));
    });
}

#[test]
fn a_misaligned_access_is_found() {
    alone("a_misaligned_access_is_found", &[], || {
        start(0);
        let sum = function(load(&ptx("int32")), "unisono_reduce_sum");
        let (a, out, stream) = (allocate(64), allocate(64), stream());
        assert_eq!(
            launch_sum(sum, stream, out, &[a + 2], 4),
            CUresult::CUDA_SUCCESS
        );
        fails!(CUDA_ERROR_MISALIGNED_ADDRESS, cuStreamSynchronize(stream));
    });
}

#[test]
fn modules_newer_than_driver_or_device_are_refused() {
    alone(
        "modules_newer_than_driver_or_device_are_refused",
        &[("VERSION", "12020")],
        || {
            start(0);
            let mut module = null_mut();
            let mut refused = |text: &str| {
                let text = CString::new(text).unwrap();
                cu!(cuModuleLoadData(&mut module, text.as_ptr().cast()))
            };
            let newer = refused("// float32\n.version 8.3\n.target sm_70\n");
            assert_eq!(newer, CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
            let device = refused("// float32\n.version 8.2\n.target sm_100\n");
            assert_eq!(device, CUresult::CUDA_ERROR_INVALID_PTX);
            assert_eq!(refused("what?"), CUresult::CUDA_ERROR_INVALID_IMAGE);
            let fine = refused("// float32\n.version 8.2\n.target sm_90\n");
            assert_eq!(fine, CUresult::CUDA_SUCCESS);
        },
    );
}
