//! A published address: refused, or read as one that writes the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use unisono::transport::endpoint::Address;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(address) = Address::from_bytes(bytes) {
        assert_eq!(address.to_bytes(), bytes);
        let _ = address.to_string();
    }
});
