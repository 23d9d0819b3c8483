//! Structs that begin with their size: read from and written to callers that were compiled for another version.

use std::mem;
use std::slice;

use unisono::error::{Error, Result};

/// A struct that begins with its size and may grow at its end.
///
/// # Safety
/// Its first field is its size, a `usize`.
pub unsafe trait Growing: Copy {
    /// How long it was in the version that had it first. Never changes.
    const FIRST_SIZE: usize;
}

/// One that C gives, and an older caller perhaps without the last fields.
///
/// # Safety
/// It is valid if its fields from `FIRST_SIZE` on, or the last of them, are those of `INITIAL`.
pub unsafe trait Given: Growing {
    /// The value of its _INIT macro: what a caller means by the fields that it does not know.
    const INITIAL: Self;
}

/// The struct at `place`. An older caller has a shorter one; a newer caller may have a longer one, as long as it asks for
/// nothing that this version does not know.
///
/// # Safety
/// `place` is NULL, or leads to a struct of the size that it says.
pub(crate) unsafe fn sized_in<T: Given>(name: &str, place: *const T) -> Result<T> {
    // SAFETY: as the caller promises.
    let size = unsafe { checked_size(name, place)? };
    let known = mem::size_of::<T>();
    if let Some(more) = size.checked_sub(known) {
        // SAFETY: there are `size` bytes, as the caller promises, and `known` of them are ours.
        let rest = unsafe { slice::from_raw_parts(place.cast::<u8>().add(known), more) };
        if rest.iter().any(|byte| *byte != 0) {
            return Err(Error::unsupported(format!(
                "{name}: the program was compiled for a newer unisono and asks for something that this one does not have"
            )));
        }
    }
    let mut value = T::INITIAL;
    // SAFETY: there are `size` bytes at `place`, and room for `known`. Fields beyond them are as in `INITIAL`, which makes
    // a valid `T`.
    unsafe { copy_bytes(place, &raw mut value, size.min(known)) };
    Ok(value)
}

/// Writes `value` to the struct at `place`, as much as it has room for, and leaves its size. Fields that only a newer
/// caller has stay as they are.
///
/// # Safety
/// As [`sized_in`].
pub(crate) unsafe fn sized_out<T: Growing>(name: &str, place: *mut T, value: T) -> Result<()> {
    // SAFETY: as the caller promises.
    let size = unsafe { checked_size(name, place)? };
    // SAFETY: there is room for `size` bytes, which is at least that of the size.
    unsafe {
        copy_bytes(&raw const value, place, size.min(mem::size_of::<T>()));
        place.cast::<usize>().write(size);
    }
    Ok(())
}

/// # Safety
/// There are `bytes` bytes at both places.
unsafe fn copy_bytes<T>(from: *const T, to: *mut T, bytes: usize) {
    // SAFETY: as the caller promises; one of the places is a variable of ours, so they do not overlap.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(from.cast(), bytes) };
}

/// # Safety
/// As [`sized_in`].
unsafe fn checked_size<T: Growing>(name: &str, place: *const T) -> Result<usize> {
    if place.is_null() {
        return Err(Error::invalid(format!(
            "{name} is needed, but NULL was given"
        )));
    }
    // SAFETY: it begins with its size.
    let size = unsafe { place.cast::<usize>().read() };
    // A size that is much too long was not filled in.
    if (T::FIRST_SIZE..=4096).contains(&size) {
        return Ok(size);
    }
    Err(Error::invalid(format!(
        "{name}: its size is {size}, but must be that of the struct; begin with the _INIT macro of its type"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As it was in its first version, and as it is now, with two fields more.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct First {
        size: usize,
        known: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Grown {
        size: usize,
        known: u64,
        number: i64,
        other: i64,
    }

    // SAFETY: `size` comes first.
    unsafe impl Growing for Grown {
        const FIRST_SIZE: usize = mem::size_of::<First>();
    }

    // SAFETY: all fields are numbers.
    unsafe impl Given for Grown {
        const INITIAL: Self = Self {
            size: mem::size_of::<Self>(),
            known: 0,
            number: -1,
            other: -2,
        };
    }

    #[test]
    fn a_caller_of_the_first_version_goes_on_to_work() {
        let mut first = First { size: 16, known: 7 };
        let place = (&raw mut first).cast::<Grown>();
        // SAFETY: it is as long as it says.
        let seen = unsafe { sized_in("options", place) }.expect("an older caller");
        assert_eq!((seen.known, seen.number, seen.other), (7, -1, -2));
        let value = Grown { known: 9, ..seen };
        // SAFETY: as above.
        unsafe { sized_out("options", place, value) }.expect("an older caller");
        assert_eq!((first.size, first.known), (16, 9));
    }

    #[test]
    fn a_caller_in_between_says_what_it_knows() {
        let mut grown = Grown {
            size: 24,
            number: 5,
            ..Grown::INITIAL
        };
        // SAFETY: it is longer than it says.
        let seen = unsafe { sized_in("options", &raw mut grown) }.expect("an older caller");
        assert_eq!((seen.number, seen.other), (5, -2));
        grown.size = 15;
        // SAFETY: as above.
        assert!(unsafe { sized_in("options", &raw mut grown) }.is_err());
    }
}
