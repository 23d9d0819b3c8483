//! The fuzz target of windows: see `crate::fuzzing`.

use super::meeting::{Description, NUMBERS};

/// The numbers of a rank's memory, and its words: refused, or a description that writes the same.
pub fn window(bytes: &[u8]) {
    let Some((numbers, words)) = bytes.split_first_chunk::<{ 8 * NUMBERS }>() else {
        return;
    };
    let numbers: Vec<u64> = numbers
        .as_chunks()
        .0
        .iter()
        .map(|number| u64::from_le_bytes(*number))
        .collect();
    if let Some(described) = Description::read(&numbers, words) {
        let (same, mut told) = described.write();
        assert_eq!(same[..], numbers);
        told.resize(words.len(), 0);
        assert_eq!(told, words);
    }
}

/// Memory in the heap, memory that is reached through a port, both and none, and that of a device, with their names.
#[cfg(test)]
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    use crate::one_sided::fuzzing::seeds;
    use crate::types::DataType;

    let others = seeds();
    let of = |name| others.iter().find(|(one, _)| *one == name);
    let part = |name| {
        of(name)
            .expect("a seed of one-sided transfers")
            .1
            .as_slice()
    };
    // The remote memory of that seed has 100 bytes.
    let port = [part("remote"), part("invitation")].concat();
    let note = b"(25,)";
    // A span of a device, with a handle and without.
    let [offset, length] = [4096_u64, 100].map(u64::to_le_bytes);
    let span = |rest: &[u8]| [&[7; 56][..], &offset, &length, rest].concat();
    let (exported, refused) = (span(&[1; 65]), span(b"\0refused"));
    [
        ("mapped", [100, 3, 4096], &b""[..], &b""[..]),
        ("far", [100, 0, 0], b"", &port),
        ("both", [100, 3, 4096], b"", &port),
        ("none", [0, 0, 0], b"", b""),
        ("device", [100, 0, 0], &exported, b""),
        ("refused", [100, 0, 0], &refused, b""),
    ]
    .map(|(name, [bytes, segment, offset], span, port)| {
        let dtype = u64::from(DataType::Float32 as u8);
        let lengths = [note.len(), span.len(), note.len() + span.len() + port.len()];
        let [note_bytes, span_bytes, words] = lengths.map(|length| length as u64);
        let numbers = [bytes, dtype, segment, offset, note_bytes, span_bytes, words];
        let numbers = numbers.map(u64::to_le_bytes);
        // Another rank has more words.
        (
            name,
            [numbers.as_flattened(), note, span, port, &[0; 3]].concat(),
        )
    })
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(seed: &[u8]) -> Option<Description> {
        let (numbers, words) = seed.split_at(8 * NUMBERS);
        let numbers = numbers.as_chunks().0.iter();
        let numbers: Vec<_> = numbers.map(|number| u64::from_le_bytes(*number)).collect();
        Description::read(&numbers, words)
    }

    #[test]
    fn every_seed_is_read_and_no_other_number_or_word() {
        for (name, seed) in seeds() {
            assert!(read(&seed).is_some(), "{name}");
            assert!(read(&seed[..seed.len() - 4]).is_none(), "{name}, cut");
            // The highest byte of a number, and a byte behind the words: a place may be anywhere, which mapping it finds out.
            let is_mapped = matches!(name, "mapped" | "both");
            let numbers = (0..NUMBERS).filter(|number| !(is_mapped && *number == 3));
            for at in numbers.map(|number| 8 * number + 7).chain([seed.len() - 1]) {
                let mut wrong = seed.clone();
                wrong[at] ^= 0x80;
                assert!(read(&wrong).is_none(), "{name}, byte {at}");
            }
        }
    }
}
