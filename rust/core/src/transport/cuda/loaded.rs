//! The kernels that a device has loaded: modules of PTX, one per element type.

use std::ffi::CString;
use std::io::Read;
use std::sync::OnceLock;

use flate2::read::GzDecoder;

use super::driver::{Device, Driver, Function, Module};
use super::kernels::THREADS;
use crate::error::{Error, Result};
use crate::locks::Mutex;
use crate::types::{DataType, ReduceOp};

/// The kernels that a device has loaded.
#[derive(Default)]
pub(super) struct Loaded {
    modules: [OnceLock<Kernels>; DataType::ALL.len()],
    /// Held by the thread that loads one: a second rank of the process waits for the first, and not for the stream of the
    /// first.
    loading: Mutex<()>,
}

/// The kernels of one type; `None` for those that have no meaning for it.
pub(super) struct Kernels {
    reduce: [Option<Function>; ReduceOp::ALL.len()],
    scale: Option<Function>,
    copy: Option<Function>,
    poison: Option<Function>,
    look: Option<Function>,
    place: Option<Function>,
}

/// Of every device of this process.
static LOADED: OnceLock<Box<[Loaded]>> = OnceLock::new();

impl Loaded {
    pub(super) fn of(device: &Device) -> Result<&'static Self> {
        let devices = Driver::load()?.devices();
        let all = LOADED.get_or_init(|| (0..devices).map(|_| Self::default()).collect());
        all.get(device.number() as usize)
            .ok_or_else(|| Error::internal(format!("{device:?} is none of {devices} devices")))
    }

    pub(super) fn reduce(
        &self,
        device: &'static Device,
        dtype: DataType,
        op: ReduceOp,
    ) -> Result<Function> {
        // Its contributions are scaled already.
        let op = match op {
            ReduceOp::PremulSum(_) => ReduceOp::Sum,
            op => op,
        };
        self.of_type(device, dtype)?.reduce[usize::from(op.number()) - 1]
            .ok_or_else(|| Error::internal(format!("there is no kernel for {op} of {dtype}")))
    }

    pub(super) fn scale(&self, device: &'static Device, dtype: DataType) -> Result<Function> {
        let scale = self.of_type(device, dtype)?.scale;
        scale.ok_or_else(|| Error::internal(format!("there is no kernel that scales {dtype}")))
    }

    pub(super) fn copy(&self, device: &'static Device) -> Result<Function> {
        let copy = self.of_type(device, DataType::UInt8)?.copy;
        copy.ok_or_else(|| Error::internal("there is no kernel that copies"))
    }

    pub(super) fn poison(&self, device: &'static Device) -> Result<Function> {
        let poison = self.of_type(device, DataType::UInt8)?.poison;
        poison.ok_or_else(|| Error::internal("there is no kernel that looks after copies"))
    }

    pub(super) fn look(&self, device: &'static Device) -> Result<Function> {
        let look = self.of_type(device, DataType::UInt8)?.look;
        look.ok_or_else(|| Error::internal("there is no kernel that looks at a word"))
    }

    pub(super) fn place(&self, device: &'static Device) -> Result<Function> {
        let place = self.of_type(device, DataType::UInt8)?.place;
        place.ok_or_else(|| Error::internal("there is no kernel that finds places"))
    }

    /// Whether the kernels of a type are there.
    pub(super) fn has(&self, dtype: DataType) -> bool {
        self.modules[place_of(dtype)].get().is_some()
    }

    /// The kernels of a type. A failure is not kept: memory may be free the next time.
    pub(super) fn of_type(&self, device: &'static Device, dtype: DataType) -> Result<&Kernels> {
        let place = &self.modules[place_of(dtype)];
        if let Some(kernels) = place.get() {
            return Ok(kernels);
        }
        let _loading = self.loading.lock();
        if let Some(kernels) = place.get() {
            return Ok(kernels);
        }
        let kernels = Kernels::load(device, dtype)?;
        Ok(place.get_or_init(|| kernels))
    }
}

fn place_of(dtype: DataType) -> usize {
    dtype as usize - 1
}

impl Kernels {
    fn load(device: &'static Device, dtype: DataType) -> Result<Self> {
        let module = Module::load(device, dtype.name(), &source(dtype)?)?;
        let find = |is_there: bool, name: &str| {
            if !is_there {
                return Ok(None);
            }
            let name = CString::new(name)
                .map_err(|_| Error::internal(format!("{name:?} is no name of a kernel")))?;
            module.function(&name, THREADS).map(Some)
        };
        let mut reduce = [None; ReduceOp::ALL.len()];
        for (place, op) in reduce.iter_mut().zip(ReduceOp::ALL) {
            let is_there = op.check(dtype).is_ok() && !matches!(op, ReduceOp::PremulSum(_));
            *place = find(is_there, &format!("unisono_reduce_{op}"))?;
        }
        Ok(Self {
            reduce,
            scale: find(
                ReduceOp::PremulSum(1.0).check(dtype).is_ok(),
                "unisono_scale",
            )?,
            copy: find(dtype == DataType::UInt8, "unisono_copy")?,
            poison: find(dtype == DataType::UInt8, "unisono_poison")?,
            look: find(dtype == DataType::UInt8, "unisono_look")?,
            place: find(dtype == DataType::UInt8, "unisono_place")?,
        })
    }
}

/// The module of a type as PTX, which `make ptx` generates from the sources beside it. It is kept compressed.
fn source(dtype: DataType) -> Result<CString> {
    macro_rules! ptx {
        ($name:literal) => {
            include_bytes!(concat!("kernels/ptx/", $name, ".ptx.gz")).as_slice()
        };
    }
    let compressed = match dtype {
        DataType::Float16 => ptx!("float16"),
        DataType::BFloat16 => ptx!("bfloat16"),
        DataType::Float32 => ptx!("float32"),
        DataType::Float64 => ptx!("float64"),
        DataType::Float8E4M3 => ptx!("float8_e4m3fn"),
        DataType::Float8E5M2 => ptx!("float8_e5m2"),
        DataType::Int8 => ptx!("int8"),
        DataType::Int16 => ptx!("int16"),
        DataType::Int32 => ptx!("int32"),
        DataType::Int64 => ptx!("int64"),
        DataType::UInt8 => ptx!("uint8"),
        DataType::UInt16 => ptx!("uint16"),
        DataType::UInt32 => ptx!("uint32"),
        DataType::UInt64 => ptx!("uint64"),
        DataType::Bool => ptx!("bool"),
        DataType::Complex64 => ptx!("complex64"),
        DataType::Complex128 => ptx!("complex128"),
        DataType::Int128 => return Err(Error::internal("no buffer has elements of int128")),
    };
    let mut text = Vec::new();
    GzDecoder::new(compressed)
        .read_to_end(&mut text)
        .map_err(|error| Error::internal(format!("the kernels for {dtype}: {error}")))?;
    CString::new(text)
        .map_err(|_| Error::internal(format!("the kernels for {dtype} have a zero inside")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_that_is_asked_for_is_embedded() {
        for dtype in DataType::ALL {
            let text = source(dtype).unwrap().into_string().unwrap();
            let has = |name: &str| text.contains(&format!(".entry {name}("));
            for op in ReduceOp::ALL {
                let name = match op {
                    ReduceOp::PremulSum(_) => "unisono_scale".to_owned(),
                    op => format!("unisono_reduce_{op}"),
                };
                assert!(has(&name) || op.check(dtype).is_err(), "{name} of {dtype}");
            }
        }
        let bytes = source(DataType::UInt8).unwrap().into_string().unwrap();
        for name in ["copy", "poison", "look", "place"] {
            assert!(bytes.contains(&format!(".entry unisono_{name}(")), "{name}");
        }
    }
}
