//! Memory of the shared heap, with ordinary memory where there is no room in it.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::OnceLock;

use unisono::PerProcess;
use unisono::config::Config;
use unisono::error::{Code, Error, Result};
use unisono::heap;
use unisono::locks::Mutex;

use crate::error::{Status, output};
use crate::fence::fence;

const ALIGNMENT: usize = 64;
/// From this size on, a block begins at a page.
const WHOLE_PAGES_FROM: usize = 64 << 10;

/// The blocks outside the heap, by address.
static ORDINARY: PerProcess<Mutex<HashMap<usize, Layout>>> = PerProcess::new(Mutex::default);

/// Bounds the heap as the environment says, once. A communicator does the same.
fn read_settings() -> Result<()> {
    static READ: OnceLock<()> = OnceLock::new();
    if READ.get().is_none() {
        if let Some(bytes) = Config::from_env()?.heap_bytes {
            heap::set_limit(bytes.0);
        }
        let _ = READ.set(());
    }
    Ok(())
}

fn allocate(bytes: usize) -> Result<NonNull<u8>> {
    read_settings()?;
    let bytes = bytes.max(1);
    if let Some(block) = heap::allocate(bytes, ALIGNMENT) {
        return Ok(block.address);
    }
    let refused = || {
        Error::new(
            Code::System,
            format!("{bytes} bytes of memory cannot be had"),
        )
    };
    let alignment = if bytes >= WHOLE_PAGES_FROM {
        heap::page()
    } else {
        ALIGNMENT
    };
    let layout = Layout::from_size_align(bytes, alignment).map_err(|_| refused())?;
    // SAFETY: the size is not zero.
    let address = NonNull::new(unsafe { alloc(layout) }).ok_or_else(refused)?;
    ORDINARY.lock().insert(address.addr().get(), layout);
    Ok(address)
}

/// Takes a block off its list: that of this process, or of one that this one was forked from, whose memory it has a copy of.
fn take_ordinary(address: usize) -> Option<Layout> {
    let own = ORDINARY.lock().remove(&address);
    own.or_else(|| {
        let mut before = ORDINARY.inherited();
        before.find_map(|blocks| blocks.try_lock()?.remove(&address))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_mem_alloc(bytes: usize, memory: *mut *mut c_void) -> Status {
    fence(|| {
        let place = output("memory", memory)?;
        place.write(allocate(bytes)?.as_ptr().cast());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_mem_free(memory: *mut c_void) -> Status {
    fence(|| {
        let Some(address) = NonNull::new(memory.cast::<u8>()) else {
            return Ok(());
        };
        // SAFETY: the header asks that the block is no longer used; for an address that begins none this returns false.
        if unsafe { heap::free(address) } {
            return Ok(());
        }
        let Some(layout) = take_ordinary(address.addr().get()) else {
            return Err(Error::invalid(format!(
                "{memory:?} was not made by unisono_mem_alloc, or was freed before"
            )));
        };
        // SAFETY: it was made with this layout, and is freed once: it was in the list.
        unsafe { dealloc(address.as_ptr(), layout) };
        Ok(())
    })
}
