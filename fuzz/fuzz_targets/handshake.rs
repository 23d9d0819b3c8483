//! Whatever comes instead of the frames of a handshake, neither side is convinced.
#![no_main]

use libfuzzer_sys::fuzz_target;
use unisono::rendezvous::handshake::{
    CHALLENGE_BYTES, GroupKey, HELLO_BYTES, Hello, Initiator, Lane, PROOF_BYTES, Purpose, Stranger,
};

fuzz_target!(|frames: ([u8; HELLO_BYTES], [u8; PROOF_BYTES], [u8; CHALLENGE_BYTES])| {
    let (hello, proof, challenge) = frames;
    let key = GroupKey::from_bytes([1; 32]);
    if let Ok(stranger) = Stranger::new(hello) {
        let _ = stranger.group();
        let challenged = stranger.challenge(&key).expect("random bytes");
        assert!(challenged.verify(&proof).is_err());
    }
    let hello = Hello {
        purpose: Purpose::TcpData,
        lane: Lane::Collective,
        from: 0,
        to: 1,
        link: [0; 16],
    };
    let initiator = Initiator::new(&key, &hello).expect("random bytes");
    assert!(initiator.prove(&challenge).is_err());
});
