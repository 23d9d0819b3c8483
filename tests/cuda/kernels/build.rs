//! Compiles the kernels as C++.

fn main() {
    let kernels = "../../../rust/core/src/transport/cuda/kernels";
    println!("cargo::rerun-if-changed={kernels}");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(1)
        .flag("-ffp-contract=off")
        .warnings(true)
        .warnings_into_errors(true)
        .file(format!("{kernels}/host.cpp"))
        .compile("unisono_cuda_kernels");
}
